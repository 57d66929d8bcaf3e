"""The packages as wheels, installed in clean environments: each works with what it declares."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import spotlight
import spotlight_bucket
import spotlight_dashboard
import spotlight_files
import spotlight_fleet
import spotlight_kernels
import spotlight_plan
import spotlight_rewards
import spotlight_weights

ROOT = Path(__file__).parents[2]
BESIDE = ("kernels", "rewards", "files", "weights", "fleet", "plan", "dashboard", "bucket")
FOLDERS = {"spotlight-rl": ".", **{f"spotlight-{name}": f"packages/{name}" for name in BESIDE}}
HEAVY = {"torch", "ray", "diffusers", "transformers"}


def done(*command: str | Path, cwd: Path) -> str:
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(list(map(str, command)), cwd=cwd, env=bare, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    found = {}
    for name, place in FOLDERS.items():
        source, out = folder / f"{name}-source", folder / name
        # A copy of what git has: a build leaves files in the folder that it builds.
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD", "."], cwd=ROOT / place, capture_output=True)
        subprocess.run(["tar", "x", "-C", source], input=archive.stdout, check=True)
        done(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, source, cwd=folder)
        (found[name],) = out.glob("*.whl")
    return found


def environment(folder: Path) -> Path:
    """The commands of a new environment in which nothing is installed."""
    done(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin"


def installed(bin_folder: Path) -> set[str]:
    listed = done(bin_folder / "pip", "list", "--format=freeze", cwd=bin_folder)
    return {line.partition("==")[0].lower() for line in listed.splitlines()}


def test_versions_are_one() -> None:
    packages = (
        spotlight,
        spotlight_kernels,
        spotlight_rewards,
        spotlight_files,
        spotlight_weights,
        spotlight_fleet,
        spotlight_plan,
        spotlight_dashboard,
        spotlight_bucket,
    )
    assert {each.__version__ for each in packages} == {spotlight.__version__}
    for place in FOLDERS.values():
        project = tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"]
        exact = {each for each in project["dependencies"] if each.startswith("spotlight-")}
        assert all(each.endswith(f"=={spotlight.__version__}") for each in exact), place


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rewards_work_without_a_trainer(wheels: dict[str, Path], tmp_path: Path) -> None:
    commands = environment(tmp_path / "env")
    done(commands / "pip", "install", "-q", wheels["spotlight-rewards"], cwd=tmp_path)
    assert not installed(commands) & {*HEAVY, "spotlight-rl", "fastapi"}
    Image.fromarray(np.full((32, 32, 3), 200, np.uint8)).save(tmp_path / "a.png")
    assert "pickscore" in done(commands / "spotlight-rewards", "list", cwd=tmp_path)
    scored = done(commands / "spotlight-rewards", "score", "jpeg_size", "a.png", cwd=tmp_path)
    assert "best and worst: scores.png" in scored
    done(commands / "spotlight-rewards", "prompts", "geneval", "prompts", "--count", "60", cwd=tmp_path)
    assert (tmp_path / "prompts" / "train.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_planning_and_dashboard_work_without_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The trainer's wheel without what it needs to train stands in for one that is not imported."""
    commands = environment(tmp_path / "env")
    done(commands / "pip", "install", "-q", wheels["spotlight-rewards"], "fastapi", "uvicorn",
         "plotly", cwd=tmp_path)  # fmt: skip
    names = ("rl", "files", "weights", "fleet", "plan", "dashboard")
    others = [wheels[f"spotlight-{name}"] for name in names]
    done(commands / "pip", "install", "-q", "--no-deps", *others, cwd=tmp_path)
    assert not installed(commands) & HEAVY
    shown = done(commands / "spotlight", "--help", cwd=tmp_path)
    assert all(word in shown for word in ("simulate", "plan", "prices", "dashboard", "report", "score"))
    small = ("--strategy", "spotlight", "--starts", "1", "run.iterations=2", "--jobs", "1")
    done(commands / "spotlight", "simulate", "paper-512", *small, cwd=tmp_path)
    assert "H100" in done(commands / "spotlight", "prices", "--gpu", "H100", cwd=tmp_path)
    program = "import sys, spotlight_dashboard.dashboard_app; assert 'torch' not in sys.modules"
    done(commands / "python", "-c", program, cwd=tmp_path)
