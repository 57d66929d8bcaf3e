"""A deadline that needs more spot nodes and a budget that needs fewer, on real processes; the head is killed
in the middle, and goes on with the same goal.

Rollouts take their time asleep, so that more nodes make them faster on a machine of any size.
"""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from main_job import Job, clean_audit
from ray_job import Running, running
from test_ray_run import LIMITS, SMALL

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

pytestmark = [pytest.mark.timeout(3000), pytest.mark.slow]

SAMPLE_S = 6.0
PATIENCE_S = 900.0
ITERATIONS, MEASURED = 12, 4
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
    *(
        "model.family=sleepy",
        f"iterations={ITERATIONS}",
        "fleet.drain_margin_s=1000",
        "fleet.target.node_s=20",
    ),
    *("rollout.prompts_per_iteration=2", "rollout.batch_size=1", "learner.micro_batch_size=4"),
    *(
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "evaluation.every=1000",
        "evaluation.prompts=1",
    ),
)
TOLD = "SELECT detail FROM incidents WHERE kind = 'spot_target' ORDER BY id"
PRICES = "SELECT MAX(price_usd_h) AS usd FROM gpu_seconds GROUP BY worker"
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
    details = [str(detail) for (detail,) in it.ask(TOLD)]
    return [int(found[1]) for each in details if (found := re.match(r"(\d+) spot nodes? instead of", each))]


def wait_until(it: Running, true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert it.process.poll() is None, it.printed
        assert time.monotonic() < end_s, it.printed
        time.sleep(0.2)


def measured(run: Path, arguments: list[str]) -> tuple[float, float, float, float]:
    """Train a few iterations with a goal that holds in any case, and stop.

    Returns:
        Seconds and dollars until the first is trained, and of each of the others.
    """
    with running(run, arguments) as it:
        wait_until(it, lambda: bool(it.ask(TRAINED)))
        first_usd = ledger_usd(run)
        wait_until(it, lambda: len(it.ask(TRAINED)) >= MEASURED)
        it.process.send_signal(signal.SIGTERM)
        assert it.end(PATIENCE_S) == 130, it.printed
        assert not asked(it), "the cheapest, or fastest, from the beginning"
        ((usd_h,),) = it.ask(f"SELECT SUM(usd) FROM ({PRICES})")
    rows = [
        row.values["target/iteration_s"] for row in read_metrics(run) if "target/iteration_s" in row.values
    ]
    assert len(rows) >= MEASURED - 1
    each_s = statistics.fmean(rows)
    return read_metrics(run)[0].wall_s, first_usd, each_s, each_s * float(str(usd_h)) / 3600


def left(run: Path) -> int:
    return ITERATIONS - len(read_metrics(run))


def ledger_usd(run: Path) -> float:
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return queries.cost_usd(connection)


def test_a_deadline_adds_nodes_and_a_killed_head_keeps_to_it(job: Job) -> None:
    run, began_s = job.root / "deadline", time.time()
    # Reserved nodes for nothing: one spot node is the cheapest.
    settings = (
        *("fleet.price_usd_h=0", "fleet.spot.price_usd_h=1"),
        *("fleet.spot.nodes=1", "fleet.target.nodes_max=4"),
    )
    arguments = job.arguments("deadline", *SMALL, *RUN, *settings)
    first_s, _, each_s, _ = measured(run, [*arguments, "--deadline-h", "1000"])
    # Two more attempts begin, of a first iteration each, and one node would be too late: also in the second,
    # which still has the time for a start. So the more is left, the longer a start takes.
    trained = len(read_metrics(run))
    rest = max(ITERATIONS - trained, math.ceil(3 + 3 * first_s / each_s))
    allowed_s = time.time() - began_s + 2 * first_s + 0.5 * rest * each_s
    arguments += [f"iterations={trained + rest}", "--deadline-h", f"{allowed_s / 3600:.4f}"]
    with running(run, arguments) as it:
        wait_until(it, lambda: bool(asked(it)))
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot AND attempt = 2", 2)
        steps = len(it.ask(TRAINED))
        wait_until(it, lambda: len(it.ask(TRAINED)) >= steps + 2)
        it.kill_head()
    trained = len(read_metrics(run))
    with running(run, arguments) as it:
        it.wait_for("SELECT 1 FROM incidents WHERE kind = 'node_joined' AND spot AND attempt = 3", 2)
        assert it.end(PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
        printed = it.printed
    rows = read_metrics(run)
    nodes = [int(row.values["target/nodes_asked"]) for row in rows if "target/nodes_asked" in row.values]
    took_s = time.time() - began_s
    print(f"one node: {each_s:.1f} s an iteration; killed after {trained} of {len(rows)}; asked for {nodes}")
    print(f"deadline after {allowed_s:.0f} s, ended after {took_s:.0f} s\n{printed}")
    assert took_s < allowed_s
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.STOPPED, Ending.KILLED, Ending.FINISHED]
    assert max(nodes) >= 2
    assert nodes[trained] >= 2, "what was measured and asked for before outlives the head"


def test_a_budget_drops_nodes_and_nothing_is_lost(job: Job) -> None:
    run = job.root / "budget"
    settings = (
        # Spot nodes cost a cent a second, so that each more is dearer: it waits for the learner, too.
        *("fleet.price_usd_h=0", "fleet.spot.price_usd_h=36"),
        *("fleet.spot.nodes=5", "fleet.target.nodes_max=5"),
        "rewards=[{name: 'reward_functions:unhurried'}]",
    )
    arguments = job.arguments("budget", *SMALL, *RUN, *settings)
    _, first_usd, each_s, each_usd = measured(run, [*arguments, "--budget-usd", "100000"])
    budget_usd = ledger_usd(run) + first_usd - each_usd + 0.8 * left(run) * each_usd
    with running(run, [*arguments, "--budget-usd", f"{budget_usd:.2f}"]) as it:
        wait_until(it, lambda: bool(it.ask("SELECT 1 FROM incidents WHERE kind = 'node_returned'")))
        ((name,), *_) = it.ask("SELECT subject FROM incidents WHERE kind = 'node_returned'")
        it.wait_for(f"SELECT 1 FROM incidents WHERE kind = 'node_lost' AND subject = '{name}'")
        assert it.end(PATIENCE_S) == 0, it.printed
        it.require_nothing_left()
        printed = it.printed
    spent_usd = ledger_usd(run)
    print(
        f"five nodes: {each_s:.1f} s, ${each_usd:.2f} an iteration; "
        f"budget ${budget_usd:.2f}, spent ${spent_usd:.2f}"
    )
    print(printed)
    report = clean_audit(run, LIMITS)
    assert [bill.ended for bill in report.attempts] == [Ending.STOPPED, Ending.FINISHED]
    assert spent_usd < budget_usd
    history = read_history(run)
    assert history.incidents[Incident.NODE_RETURNED, True] >= 1
    assert history.preemptions == 0, "what is given back is not preempted"
    assert Incident.LEARNER_LOST not in {kind for kind, _ in history.incidents}
