"""The one-GPU suite's rows of results and processes, on a tiny model on the GPU: ``pytest -m gpu``.

The same functions run on the whole model by ``python -m benchmarks.gpu``, and on a CPU in
``tests/e2e/test_gpu_suite.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.suite import Row, Skip, Verdict

if TYPE_CHECKING:
    from benchmarks.gpu.lab import Lab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    from benchmarks.gpu.lab import Lab

    device = torch.device("cuda", torch.cuda.current_device())
    made = Lab(tmp_path_factory.mktemp("gs"), device, tiny=True)
    yield made
    made.drop()


CHECKED = [row for row in ROWS if not row.speed and row.name != "tests"]  # that row runs these tests


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_a_row_holds_for_a_tiny_model(row: Row, lab: Lab) -> None:
    from benchmarks.gpu.runner import call

    for left in Path(lab.home).glob("commit*"):
        left.rename(lab.home / f"before-{left.name}")
    try:
        outcome = call(row, lab)
    except Skip as why:
        pytest.skip(str(why))
    assert row.verdict(outcome.value, tiny=True) is Verdict.PASS, outcome
