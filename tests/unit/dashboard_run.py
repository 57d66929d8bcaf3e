"""Run directories as a run writes them, and the dashboard served, for its tests."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

from spotlight.scheduler.records import (
    REWARD,
    CommitRejected,
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import (
    DropReason,
    Lease,
    LeaseId,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.store.images import Tile, keep_tiles, write_grid
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.ledger.sqlite_ledger import GpuSpend, GrantedLease, SqliteLedger
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_estimate import RunEstimate, Span, write_estimate
from spotlight_dashboard.dashboard_app import dashboard_app
from spotlight_dashboard.dashboard_keys import DashboardKeys, Guesses
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.service.guarded_connections import guarded

TOKEN = "a-token-of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
RIGHT_TO_LEFT = "\u202eשלושה עיגולים אדומים\u202c"
LONG = "x" * 10_000
PROMPTS = (HOSTILE, RIGHT_TO_LEFT, LONG, "two red circles")
START_S = 1_700_000_000.0
ITERATION_S = 12.0
ITERATIONS, EVERY = 12, 4
"""Iterations of the run that most tests read, and between two evaluations."""
GROUP_SIZE = 2
MEMBERS = range(GROUP_SIZE)
RESERVED, SPOT_USD_H, RESERVED_USD_H = WorkerId("reserved-0/0"), 0.25, 1.0
LEASES_EACH = 3
"""Leases of an iteration: numbers, of which that on a node which is lost is not always given."""
LEFT_AT_STEP = 3
"""Of a lost node's rollouts: the step at which the next node goes on."""
_TOGETHER = 100
"""Iterations per transaction: real runs write more often, to the same rows."""


def make_run(directory: Path, iterations: int = 12, *, every: int = 4, planned: int = 20) -> RunPaths:
    """A run of ``iterations`` with an evaluation and a preemption every ``every``, stopped before its end."""
    paths = RunPaths(directory)
    for folder in (paths.images, paths.attempts):
        folder.mkdir(parents=True)
    paths.config.write_text(
        f"name: {directory.name}\niterations: {planned}\nrollout: {{group_size: {GROUP_SIZE}}}\n"
        f"fleet: {{driver: ray, price_usd_h: {RESERVED_USD_H}}}\nlearner: {{updates_per_batch: 1}}\n"
    )
    paths.attempt_log(1).write_text(f"the log\n{HOSTILE}\n")
    write_estimate(paths.estimate, RunEstimate(20, 6, 0, Span(200, 300, 500), Span(1, 2, 3), HOSTILE))
    with (
        SqliteLedger(paths.ledger) as ledger,
        MetricsWriter(paths, resume_at=0) as metrics,
    ):
        _write_ledger(ledger, iterations, every)
        for iteration in range(iterations):
            for row in _rows(iteration, iteration % every == 0):
                metrics.write(row)
    for iteration in range(0, min(iterations, 4 * every), every):
        write_grid(paths, iteration, list(_tiles(iteration)), columns=GROUP_SIZE, title="evaluation")
        keep_tiles(paths, iteration, list(_trained(iteration)), TRAINING)
    return paths


def change_course(
    paths: RunPaths, iteration: int, changes: Mapping[str, tuple[object, object]], position: int = 1
) -> None:
    """As an attempt records that resumes there with other values, and ends at once."""
    with SqliteLedger(paths.ledger) as ledger:
        ledger.begin_attempt(pid=2, host="elsewhere", workers={}, now_s=START_S + 10 * ITERATION_S)
        ledger.record_course(position, iteration, changes, START_S + 10 * ITERATION_S)
        ledger.end_attempt(Ending.STOPPED)


def _write_ledger(ledger: SqliteLedger, iterations: int, every: int) -> None:
    ledger.begin_attempt(pid=1, host="elsewhere", workers={RESERVED: RESERVED_USD_H}, now_s=START_S)
    ledger.record_incident(Incident.NODE_JOINED, "reserved-0", spot=False, detail="1 x gpu", now_s=START_S)
    spot: WorkerId | None = None
    pending: list[Record] = [
        PromptSeen(Prompt(PromptId(f"p{at}"), text, {"tag": "hostile" if at < 3 else "plain"}))
        for at, text in enumerate(PROMPTS)
    ]
    granted: list[GrantedLease] = []
    for iteration in range(iterations):
        now_s, gone = START_S + iteration * ITERATION_S, spot
        if iteration % every == 0:
            spot = _replace(ledger, spot, iteration // every, now_s)
            pending += _evaluation(iteration)
        assert spot is not None
        pending += _iteration(iteration, spot)
        granted += _granted(iteration, gone, spot, now_s, evaluates=iteration % every == 0)
        if iteration % _TOGETHER == 0 or iteration == iterations - 1 or iterations < _TOGETHER:
            ledger.append(list(enumerate(pending, ledger.position() + 1)), granted)
            pending, granted = [], []
        ledger.spend(list(_bill(spot)), now_s + ITERATION_S)
    ledger.end_attempt(Ending.STOPPED)


def _granted(
    iteration: int, gone: WorkerId | None, spot: WorkerId, now_s: float, *, evaluates: bool
) -> Iterator[GrantedLease]:
    first = iteration * LEASES_EACH + 1
    rollouts = tuple(each.id for each in _rollouts("t", Purpose.TRAIN, iteration, prompts=2))
    if evaluates:
        evaluated = tuple(each.id for each in _rollouts("e", Purpose.EVAL, iteration, prompts=len(PROMPTS)))
        yield GrantedLease(Lease(LeaseId(first), RESERVED, 1, evaluated, 0.0), {}, now_s)
    moved = gone is not None and gone != spot
    if gone is not None and moved:
        yield GrantedLease(Lease(LeaseId(first + 1), gone, 10**6, rollouts, 0.0), {}, now_s - 7)
    steps = dict.fromkeys(rollouts, LEFT_AT_STEP) if moved else {}
    yield GrantedLease(Lease(LeaseId(first + 2), spot, iteration, rollouts, 0.0), steps, now_s + 1)


def _replace(ledger: SqliteLedger, gone: WorkerId | None, number: int, now_s: float) -> WorkerId:
    if gone is not None:
        node = gone.partition("/")[0]
        ledger.stop_billing([gone], now_s)
        ledger.record_incident(Incident.NODE_NOTICED, node, spot=True, detail="10 s before", now_s=now_s - 5)
        ledger.record_incident(Incident.NODE_LOST, node, spot=True, detail=HOSTILE, now_s=now_s)
    worker = WorkerId(f"spot-{number}/0")
    ledger.start_billing({worker: SPOT_USD_H}, now_s)
    ledger.record_incident(Incident.NODE_JOINED, f"spot-{number}", spot=True, detail="1 x gpu", now_s=now_s)
    return worker


def _bill(spot: WorkerId) -> Iterator[GpuSpend]:
    for worker, price, phases in (
        (RESERVED, RESERVED_USD_H, {Phase.IDLE: 7.0, Phase.TRAINING: 4.5, Phase.CHECKPOINT: 0.5}),
        (spot, SPOT_USD_H, {Phase.ROLLOUT: 7.5, Phase.WEIGHT_SYNC: 0.5, Phase.IDLE: 3.5, Phase.LOST: 0.5}),
    ):
        yield from (GpuSpend(worker, phase, seconds, price) for phase, seconds in phases.items())


def _iteration(iteration: int, worker: WorkerId) -> Iterator[Record]:
    version = PolicyVersion(iteration)
    rollouts = list(_rollouts("t", Purpose.TRAIN, iteration, prompts=2))
    yield from (RolloutIssued(rollout) for rollout in rollouts)
    for rollout in rollouts:
        yield SampleFinished(rollout.id, version, worker, epoch=iteration)
        if iteration == 1:
            yield CommitRejected(rollout.id, "stale epoch")
    dropped = rollouts.pop() if iteration == 2 else None
    if dropped is not None:
        yield SampleDropped(dropped.id, DropReason.REWARD_ERROR, HOSTILE)
    for rollout in rollouts:
        reward = 0.5 + 0.4 * math.tanh(iteration / 10) * (0.5 + rollout.member / 2)
        yield SampleScored(rollout.id, {REWARD: reward, "shapes": reward})
    yield from (SampleTrained(rollout.id, PolicyVersion(version + 1)) for rollout in rollouts)
    yield StepApplied(PolicyVersion(version + 1), iteration, 0, len(rollouts), 1.0, 0.1)
    yield VersionPublished(PolicyVersion(version + 1))


def _evaluation(iteration: int) -> Iterator[Record]:
    for rollout in _rollouts("e", Purpose.EVAL, iteration, prompts=len(PROMPTS)):
        yield RolloutIssued(rollout)
        yield SampleFinished(rollout.id, rollout.version, RESERVED, epoch=1)
        yield SampleScored(rollout.id, {REWARD: tile_score(iteration, rollout.member), "strict": 1.0})
        yield SampleEvaluated(rollout.id)


def _rollouts(letter: str, purpose: Purpose, iteration: int, prompts: int) -> Iterator[Rollout]:
    for prompt in range(prompts):
        for member in MEMBERS:
            yield Rollout(
                id=RolloutId(f"{letter}{iteration:06d}-{prompt:03d}-{member:03d}"),
                purpose=purpose,
                iteration=iteration,
                prompt_id=PromptId(f"p{(prompt + iteration) % len(PROMPTS) if letter == 't' else prompt}"),
                member=member,
                seed=2**62 + prompt * 10 + member,
                steps=8,
                version=PolicyVersion(iteration),
            )


def tile_score(iteration: int, member: int) -> float:
    """The score of one picture."""
    return round(0.3 + 0.01 * iteration + 0.1 * member, 6)


def _tiles(iteration: int) -> Iterator[Tile]:
    colours = np.asarray([(200, 40, 40), (40, 90, 200), (40, 160, 80), (230, 180, 30)], dtype=np.uint8)
    for prompt, text in enumerate(PROMPTS):
        for member in MEMBERS:
            picture = np.full((24, 24, 3), 255, dtype=np.uint8)
            picture[4 : 12 + iteration % 8, 4 + 4 * member : 20] = colours[prompt]
            yield Tile(picture, text, tile_score(iteration, member))


def _trained(iteration: int) -> Iterator[Tile]:
    """Best and worst of the first two prompts, in which another reward says otherwise."""
    for prompt, text in enumerate(PROMPTS[:2]):
        for place, score in enumerate((0.9, 0.1)):
            picture = np.full((24, 24, 3), 200 * place + iteration % 50, dtype=np.uint8)
            scores = {"reward": score, "shapes": score, "judge": 1 - score}
            name = f"t{iteration:06d}-{prompt:03d}-{place:03d}"
            yield Tile(picture, text, score, member=place, rollout=name, scores=scores)


def _rows(iteration: int, evaluated: bool) -> Iterator[MetricsRow]:
    noise = random.Random(iteration)
    wall_s = (iteration + 1) * ITERATION_S
    if evaluated:
        graded = 0.5 + 0.4 * math.tanh(iteration / 10)
        scores = {"validation/graded": graded, "validation/graded_stderr": 0.02}
        yield MetricsRow(iteration, 4 * iteration, wall_s - 2, scores)
    values = {f"train/metric_{number}": noise.gauss(0, 1) for number in range(40)}
    values |= {
        "rollout/reward": 0.5 + 0.4 * math.tanh(iteration / 10) + noise.gauss(0, 0.01),
        "train/loss": math.nan if iteration == 3 else 1 / (1 + iteration) + noise.random() / 100,
        "train/grad_norm": noise.random(),
        "advantage/silent_groups_share": 0.1,
    }
    yield MetricsRow(iteration, 4 * iteration + 4, wall_s, values)


def truncated_picture(paths: RunPaths, iteration: int) -> None:
    """Leave half a picture, as while it is written."""
    whole = sorted((paths.images / "tiles").glob(f"{iteration:06d}-*.png"))[0]
    whole.write_bytes(whole.read_bytes()[:20])


def client_of(*places: Path) -> TestClient:
    """Asks a dashboard of these places, as a program of the same machine."""
    app = dashboard_app(places, DashboardKeys(TOKEN))
    return TestClient(app, base_url="http://localhost:8170", headers=BEARER)


def ask(client: TestClient, what: str, run: str = "wild", **query: object) -> Any:
    """What ``client`` is answered; ``NaN`` and ``Infinity`` are no JSON."""
    answer = client.get(f"/api/runs/{run}/{what}", params={key: str(value) for key, value in query.items()})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


@contextmanager
def served(place: Path, port: int = 0, guesses: Guesses | None = None) -> Iterator[str]:
    """The address of a real server on the loopback, which :data:`TOKEN` opens."""
    listening = socket.create_server(("127.0.0.1", port))
    app = dashboard_app([place], DashboardKeys(TOKEN, guesses=guesses or Guesses()))
    server = uvicorn.Server(guarded(app, timeout_graceful_shutdown=3))
    app.state.ends = lambda: server.should_exit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
