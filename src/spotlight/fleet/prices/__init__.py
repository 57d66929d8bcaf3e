"""What GPUs cost: a dated built-in table, price catalogues, and the clouds' own interfaces."""
