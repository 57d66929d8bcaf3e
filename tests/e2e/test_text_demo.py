"""What `make demo-text` trains learns to spell, by its reader and by the judge that it is not trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spotlight.report.record import read_run

EXAMPLE = Path(__file__).parents[2] / "examples/testbed-text.yaml"


@pytest.mark.slow
def test_held_out_words_are_spelled_better_after_six_iterations(tmp_path: Path) -> None:
    overrides = (
        "iterations=6",
        "evaluation.every=0",
        "evaluation.images_per_prompt=4",
        f"runs_dir={tmp_path}",
    )
    subprocess.run(
        [sys.executable, "-m", "spotlight.cli", "train", EXAMPLE, "--plain", *overrides], check=True
    )
    run = read_run(tmp_path / "testbed-text")
    assert run.change("strict").margin > 0.2
    assert run.change("ocr/exact").margin > 0.15
    assert "`ocr` was not trained on" in (tmp_path / "testbed-text/card/README.md").read_text()
