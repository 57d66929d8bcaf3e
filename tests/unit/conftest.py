"""The runs that all tests of the dashboard read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from starlette.testclient import TestClient
from tests.unit.dashboard_run import (
    EVERY,
    ITERATIONS,
    client_of,
    make_run,
)
from tests.unit.store_history import SCRATCH


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    """A folder with the run ``wild``, another without a ledger, and files that are nobody's business."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        yield _fill(Path(scratch) / "runs")


@pytest.fixture
def empty_place() -> Iterator[Path]:
    """An empty folder where syncing costs nothing."""
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        yield Path(scratch)


def _fill(root: Path) -> Path:
    paths = make_run(root / "wild", ITERATIONS, every=EVERY)
    (root / "new").mkdir()
    (root / "new" / "config.yaml").write_text("name: new\niterations: 5\n")
    (paths.path / "storage-token").write_text("secret")
    (root.parent / "outside.log").write_text("secret")
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere" / "config.yaml").write_text("name: elsewhere\n")
    (root / "linked").symlink_to(root.parent / "elsewhere")
    (paths.attempts / "linked.log").symlink_to(root.parent / "outside.log")
    (paths.images / "tiles" / "000000-099.png").symlink_to(root.parent / "outside.log")
    return root


@pytest.fixture(scope="module")
def client(places: Path) -> TestClient:
    """Asks a dashboard of ``places``."""
    return client_of(places)
