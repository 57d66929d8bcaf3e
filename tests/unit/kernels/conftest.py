"""Tests of Triton's kernels on a CPU, which ``tests/unit/test_interpreted_kernels.py`` runs: whether they are
interpreted is decided for a whole process, when Triton is imported.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
