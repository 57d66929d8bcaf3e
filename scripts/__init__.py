"""Scripts that write pictures and tables of the documentation, and measure the code."""
