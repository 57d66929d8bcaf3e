"""Tests of Triton's kernels on a CPU, which ``tests/unit/test_interpreted_kernels.py`` runs: whether they are
interpreted is decided for a whole process, when Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once_a_kernel() -> Iterator[None]:
    """Triton's interpreter looks through its whole language at each call of a helper: 40 % of all time here.

    A kernel has patched it already then, and what only helpers see stays patched from their first call.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        seen = [each for each in fn.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(language.load) for language in seen) or not seen:
            return patch(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        yield
