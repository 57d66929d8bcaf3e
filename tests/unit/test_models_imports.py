"""Naming a model family, or its types, costs no import of what runs it."""

from __future__ import annotations

import subprocess
import sys


def test_contracts_and_registry_import_without_the_libraries_behind_them() -> None:
    heavy = "{'diffusers', 'transformers', 'peft', 'accelerate'}"
    code = f"import sys, spotlight.models.family, spotlight.models; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
