"""Every package declares what it imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROUGHT = {"pydantic-core": "pydantic", "starlette": "fastapi", "botocore": "boto3"}
"""Distributions that are part of another, which pins them."""


def canonical(requirement: str) -> str:
    """A requirement's distribution, without version and extras."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("package", [".", *(f"packages/{each.name}" for each in ROOT.glob("packages/*"))])
def test_a_package_declares_what_it_imports(package: str) -> None:
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    needed = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {canonical(project["name"]), *(canonical(each) for some in needed for each in some)}
    installed, undeclared = packages_distributions(), set()
    for file in (ROOT / package / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names:
            found = {canonical(name) for name in installed.get(top, [top])}
            if not {BROUGHT.get(name, name) for name in found} & declared:
                undeclared.add(f"{file.relative_to(ROOT)} imports {top}")
    assert not undeclared


def test_lines_that_install_a_clone_name_every_package_that_the_core_needs() -> None:
    """What is not there would be looked for on PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonical(each) for each in project["dependencies"] if each.startswith("spotlight-")}
    folders = {name.removeprefix("spotlight-") for name in needed}
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    lines = 0
    for name in filter(None, listed.stdout.split("\0")):
        if Path(name).suffix not in {".md", ".yaml", ".yml", ".lock", ".ipynb", ".sh", ""}:
            continue
        for line in (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines():
            if (
                re.search(r"install .*(-e |[ '\"])\.[ '\"\[]", line)
                and "packages/" in line
                and "packages/*" not in line
            ):
                lines += 1
                braced = re.search(r"packages/\{([\w,]+)\}", line)
                named = set(braced[1].split(",")) if braced else set(re.findall(r"packages/(\w+)", line))
                assert folders <= named, f"{name}: {line.strip()} lacks {sorted(folders - named)}"
    assert lines >= 5
