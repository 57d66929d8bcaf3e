"""A run of any family on Ray that loses a spot node at work: audit clean, pictures those of one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from family_job import family_job
from main_job import NFT, clean_audit, run_process
from ray_job import running
from tests.contract.family_cases import CASES

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_audit import AuditLimits
from spotlight.store.run_directory import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMITS = AuditLimits(group_size=4)
RAY = ("fleet.driver=ray", "fleet.spot.notice_s=null", "fleet.spot.nodes=2")
TOLERANCE = 1e-4
"""Relative, of rewards: sizes of JPEG files, which rounding hardly changes."""
WORKS = "SELECT DISTINCT worker FROM samples WHERE worker LIKE 'spot-%'"


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *((name, "none") for name in CASES if name != "qwen-image"),  # test_ray_run.py
        ("qwen-image", "nf4"),
        ("wan", "int8"),
    ],
)
def test_a_lost_node_changes_nothing(tmp_path: Path, name: str, quantize: str) -> None:
    job, given = family_job(tmp_path, name, CASES[name].first[0])
    few = ("rollout.group_size=4", "rollout.prompts_per_iteration=2")
    settings = (*given, *NFT, *few, f"model.quantize={quantize}")
    run = job.root / "lost"
    job.root.mkdir()
    with running(run, job.arguments("lost", *settings, *RAY)) as it:
        worker = str(it.wait_for(WORKS)[0][0])
        it.kill(1 + int(worker.partition("/")[0].removeprefix("spot-")))  # the first node is reserved
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_lost'")
        assert it.end(2 * 240.0) == 0, it.printed
        it.require_nothing_left()
    clean_audit(run, LIMITS)
    ended = run_process(job.arguments("inline", *settings), answer=tmp_path / "inline.json")
    assert ended.finished, ended
    ours, theirs = rewards(run), rewards(job.root / "inline")
    assert ours.keys() == theirs.keys()
    first = {key: value for key, value in ours.items() if key[0] == 0}
    assert first == pytest.approx({key: theirs[key] for key in first}, rel=TOLERANCE)


def rewards(run: Path) -> dict[tuple[object, ...], float]:
    """Of the rollouts that were trained on, by iteration, prompt and member."""
    query = (
        "SELECT iteration, prompt, member, value FROM rollouts JOIN rewards ON id = rollout "
        "WHERE purpose = 'train'"
    )
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return {tuple(key): float(value) for *key, value in connection.execute(query)}
