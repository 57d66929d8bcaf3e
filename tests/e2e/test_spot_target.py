"""A deadline that needs more spot nodes and a budget that needs fewer, on real processes; the head is killed in
the middle, and goes on with the same goal.

Rollouts take their time asleep, so that more nodes make them faster on a machine of any size.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_job import Job, clean_audit
from ray_job import PATIENCE_S, Running, running
from test_ray_run import LIMITS, SMALL

from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.metrics import read_metrics

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow]

SAMPLE_S = 2.0
MODULE = f"""
import time

from spotlight.models.families.qwen_image import QwenImage


class Sleepy(QwenImage):
    name = "sleepy"

    def decode(self, latents, size):
        time.sleep({SAMPLE_S} * len(latents))
        return super().decode(latents, size)
"""
RUN = (
    *("model.family=sleepy", "fleet.driver=ray", "fleet.drain_margin_s=1000"),
    *("rollout.prompts_per_iteration=4", "rollout.batch_size=1", "learner.micro_batch_size=4"),
    *("evaluation.at_start=false", "evaluation.every=1000", "evaluation.prompts=1"),
    *("fleet.target.node_s=20", "fleet.price_usd_h=36", "fleet.spot.price_usd_h=36"),
)
ITERATION_S = 16 * SAMPLE_S
"""Worker-seconds of an iteration."""
TOLD = "SELECT detail FROM incidents WHERE kind = 'spot_target' ORDER BY id"
TRAINED = "SELECT 1 FROM optimizer_steps"


@pytest.fixture(scope="module", autouse=True)
def sleepy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A family whose pictures take their time, as an installed package adds one."""
    site = tmp_path_factory.mktemp("site")
    (site / "dozing.py").write_text(MODULE)
    info = site / "dozing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dozing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[spotlight.families]\nsleepy = dozing:Sleepy\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        yield


def asked(it: Running) -> list[int]:
    """Numbers of nodes asked for, in order."""
    told = [str(detail) for (detail,) in it.ask(TOLD)]
    return [int(found[1]) for each in told if (found := re.match(r"(\d+) spot nodes? instead of", each))]


def wait_until_asked(it: Running, nodes: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while nodes not in asked(it):
        assert it.process.poll() is None, it.told
        assert time.monotonic() < end_s, it.told
        time.sleep(0.2)


def test_a_deadline_adds_nodes_and_a_killed_head_keeps_to_it(job: Job) -> None:
    run, iterations = job.root / "deadline", 30
    # One node takes more than 32 s an iteration, four take at least 8: with fewer than three it is too late.
    deadline_s = 150 + iterations * (ITERATION_S / 3 + 3)
    settings = (
        *(f"iterations={iterations}", "fleet.spot.nodes=1", "fleet.target.nodes_max=4"),
        *("--deadline-h", f"{deadline_s / 3600:.4f}"),
    )
    arguments = job.arguments("deadline", *SMALL, *RUN, *settings)
    began_s = time.time()
    with running(run, arguments) as it:
        wait_until_asked(it, 2)
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot", 2)
        it.wait_for(TRAINED, len(it.ask(TRAINED)) + 2)
        it.kill_head()
    trained = len(read_metrics(run))
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot AND attempt = 2", 2)
        assert it.end(4 * PATIENCE_S) == 0, it.told
        it.require_nothing_left()
        told = it.told
    took_s = time.time() - began_s
    print(f"deadline {deadline_s:.0f} s, took {took_s:.0f} s; killed after {trained} iterations; {told}")
    assert took_s < deadline_s, told
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.KILLED, Ending.FINISHED]
    rows = read_metrics(run)
    nodes = [row.values["target/nodes_asked"] for row in rows if "target/nodes_asked" in row.values]
    assert nodes[0] == 1
    assert max(nodes) >= 3, nodes
    assert nodes[trained] >= 2, "what was measured and asked for before outlives the head"


def test_a_budget_drops_nodes_and_nothing_is_lost(job: Job) -> None:
    run, iterations = job.root / "budget", 24
    # A second of any node costs a cent: the fewer nodes, the less they wait for the learner.
    settings = (
        *(f"iterations={iterations}", "fleet.spot.nodes=6", "fleet.target.nodes_max=6"),
        *("--budget-usd", f"{0.01 * (60 * 7 + iterations * (ITERATION_S + 14)):.2f}"),
    )
    with running(run, job.arguments("budget", *SMALL, *RUN, *settings)) as it:
        dropped = it.wait_for("SELECT subject FROM incidents WHERE kind = 'node_returned'")
        it.wait_for(f"SELECT 1 FROM incidents WHERE kind = 'node_lost' AND subject = '{dropped[0][0]}'")
        assert it.end(4 * PATIENCE_S) == 0, it.told
        it.require_nothing_left()
        print(it.told)
    clean_audit(run, LIMITS)
    history = read_history(run)
    assert history.incidents[Incident.NODE_RETURNED, True] >= 2, it.told
    assert history.preemptions == 0, "what is given back is not preempted"
    assert Incident.LEARNER_LOST not in {kind for kind, _ in history.incidents}
