"""One GPU, all that matters on it: ``python -m benchmarks.gpu --part A|B|C --json FILE``.

Part A asks whether results are right, B how fast, C what happens between processes.
``docs/howto/gpu-suite.md`` says how to run it on a bare machine and how to read it.
"""
