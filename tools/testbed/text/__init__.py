"""Makes a testbed that writes: a tiny Qwen-Image pipeline of short words."""
