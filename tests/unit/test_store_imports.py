"""The run directory can be read and audited without the libraries that train."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import spotlight.store


def test_the_store_imports_without_torch() -> None:
    modules = [f"spotlight.store.{module.name}" for module in pkgutil.iter_modules(spotlight.store.__path__)]
    assert len(modules) > 8
    heavy = {"torch", "diffusers", "transformers", "ray", "tensorflow", "wandb"}
    code = f"import sys, {', '.join(modules)}; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
