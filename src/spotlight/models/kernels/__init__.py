"""Which kernels the DiT runs on: attention implementations and compilation. Results differ by rounding."""
