"""Progress says what is known, redraws by itself, and costs the run nothing."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from spotlight.cli.runs import progress
from spotlight.cli.runs.progress import Facts, LiveProgress, PlainProgress, RunProgress, make_progress
from spotlight.config.schema import RunConfig
from spotlight.runtime.observer import tell_stop
from spotlight.scheduler.types import Phase

EVALUATED = {"strict": 0.487, "strict_stderr": 0.025, "graded": 0.834, "graded_stderr": 0.006}
LATER = {"strict": 0.781, "strict_stderr": 0.021, "graded": 0.94, "graded_stderr": 0.004}
ROW = {"rollout/reward": 0.7341, "train/loss": 0.01234, "train/grad_norm": 0.81, "seconds/rollout": 2.0}


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def facts(clock: Clock) -> Facts:
    return Facts(total=10, price_usd_h=3.6, started=clock.now)


def screen(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_time_left_and_cost_follow_the_iterations(clock: Clock) -> None:
    known = facts(clock)
    assert math.isnan(known.left_s)
    clock.now += 60  # the first iteration pays for warming up, and does not count
    known.take_iteration(4, ROW)
    for iteration in (5, 6):
        clock.now += 8
        known.take_iteration(iteration, ROW)
    assert known.done == 7
    assert known.seconds_per_iteration == pytest.approx(8)
    assert known.left_s == pytest.approx(3 * 8)
    assert known.cost_usd == pytest.approx(76 * 3.6 / 3600)
    known.billed_usd = 2.0  # of earlier attempts
    assert known.cost_usd == pytest.approx(2 + 76 * 3.6 / 3600)


def test_the_rate_is_that_of_the_present_stretch_of_work(clock: Clock) -> None:
    known = facts(clock)
    known.take_work(Phase.ROLLOUT, 0.5, 10)  # how long this took is not known
    clock.now += 2
    known.take_work(Phase.ROLLOUT, 8.5, 10)
    clock.now += 60  # nothing happens meanwhile
    assert known.rate == pytest.approx(4)
    known.take_work(Phase.ROLLOUT, 0.5, 10)  # the next iteration
    assert math.isnan(known.rate)


@pytest.mark.parametrize(
    "silent",
    [
        {"advantage/silent_groups_share": 1.0},
        {"choice/trained": 0.0, "choice/not_chosen": 0.0, "choice/silent": 8.0},
    ],
)
def test_the_first_iteration_without_any_contrast_is_reported_once(
    clock: Clock, silent: dict[str, float]
) -> None:
    console = Console(file=io.StringIO(), width=40)
    plain = PlainProgress(facts(clock), console)
    plain.iterated(
        0, ROW | {"advantage/silent_groups_share": 0.9, "choice/trained": 4.0, "choice/silent": 4.0}
    )
    assert "equal" not in screen(console)
    for iteration in (1, 2):
        plain.iterated(iteration, ROW | silent)
    assert screen(console).count("in each group of iteration 2 all rewards are equal") == 1
    assert screen(console).count("are equal") == 1


def test_plain_lines_say_an_event_each(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=40)
    plain = PlainProgress(facts(clock), console)
    plain.note("attempt 2: resuming after iteration 3 [from a checkpoint]")
    plain.evaluated(3, EVALUATED)
    clock.now += 65
    plain.iterated(3, ROW)
    clock.now += 5
    plain.iterated(4, ROW)
    assert screen(console).splitlines() == [
        "[0:00] attempt 2: resuming after iteration 3 [from a checkpoint]",
        "[0:00] validation at iteration 3: strict 0.487 ± 0.025  graded 0.834 ± 0.006",
        "[1:05] iteration 4/10  reward 0.7341  loss 0.01234  grad_norm 0.81  $0.065",
        "[1:10] iteration 5/10  reward 0.7341  loss 0.01234  grad_norm 0.81  5.0 s each, 0:25 left  $0.07",
    ]


def test_rounding_above_the_clip_range_is_a_warning_once(clock: Clock) -> None:
    for clip_range, warned in ((1e-4, False), (1e-5, True)):
        console = Console(file=io.StringIO(), width=400)
        known = facts(clock)
        known.clip_range = clip_range
        plain = PlainProgress(known, console)
        for iteration in (3, 4):
            plain.iterated(iteration, ROW | {"replay/step_000": 1e-6, "replay/step_001": 3e-5})
        lines = [line for line in screen(console).splitlines() if "log-probs" in line]
        assert len(lines) == 1
        assert f"by 3.0e-05 (algorithm.clip_range {clip_range:g})" in lines[0]
        assert ("WARNING" in lines[0] and "stop_gradient" in lines[0]) == warned


def test_long_work_is_said_now_and_then_only(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    plain = PlainProgress(facts(clock), console)
    for second in range(100):
        clock.now += 1
        plain.work(Phase.ROLLOUT, second + 1, 100)
    assert len(screen(console).splitlines()) == 3
    assert "rollout 31/100  1.0/s" in screen(console)


def test_a_stop_that_waits_says_how_long(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    plain = PlainProgress(facts(clock), console)
    tell_stop(plain, "not measured yet", at_once=False)
    for done in range(1, 4):
        clock.now += 5
        plain.work(Phase.TRAINING, done, 12)
    tell_stop(plain, "trained to its end first", at_once=False)
    tell_stop(plain, "begins again", at_once=True)
    said = [line.partition("] ")[2] for line in screen(console).splitlines()]
    assert said == ["not measured yet", "trained to its end first: about 45 s", "begins again"]


def test_the_live_screen_shows_both_bars_the_scores_and_what_is_left(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    live = LiveProgress(facts(clock), console)
    live.facts.take_validation(EVALUATED)
    live.facts.take_validation(LATER)
    for iteration in (0, 1):
        clock.now += 10
        live.facts.take_iteration(iteration, ROW)
    live.work(Phase.TRAINING, 2, 3)
    clock.now += 1
    still = Console(file=io.StringIO(), width=100)
    still.print(live.draw())
    drawn = screen(still)
    assert "2/10" in drawn
    assert "0:21, 1:28 left, $0.021" in drawn
    assert "training" in drawn
    assert "2/3" in drawn
    assert "strict 0.487 -> 0.781  graded 0.834 -> 0.940" in drawn
    assert "loss 0.01234" in drawn


def test_events_cost_microseconds() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    events = 20_000
    with LiveProgress(Facts(10, 1.0), console) as live:
        begun = time.thread_time()
        for index in range(events):
            live.work(Phase.ROLLOUT, index % 10 + 1, 10)
        spent = time.thread_time() - begun
    assert spent / events < 20e-6


def test_validations_and_notes_stay_on_the_live_screen() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveProgress(Facts(10, 1.0), console) as live:
        live.note("resumed [here]")
        live.evaluated(5, EVALUATED)
    assert "resumed [here]" in screen(console)
    assert "validation at iteration    5: strict 0.487 ± 0.025" in screen(console)


def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    first = make_progress(RunConfig(), plain=False)
    assert isinstance(first, PlainProgress)  # the tests' output is no terminal
    assert first.facts.price_usd_h == pytest.approx(4 * RunConfig().fleet.price_usd_h)
    monkeypatch.setenv("RANK", "1")
    assert type(make_progress(RunConfig(), plain=False)) is RunProgress


def test_a_run_goes_on_when_nobody_reads_its_output_any_more() -> None:
    program = (
        "from spotlight.cli.runs.progress import make_progress\n"
        "from spotlight.config.schema import RunConfig\n"
        "import sys, time\n"
        "with make_progress(RunConfig(), plain=True) as progress:\n"
        "    progress.note('ready')\n"
        "    sys.stdin.readline()\n"
        "    for _ in range(3):\n"
        "        progress.note('x' * 100_000)\n"
        "sys.stderr.write('ended')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as run:  # fmt: skip
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        assert b"ready" in run.stdout.readline()
        run.stdout.close()
        run.stdin.write(b"\n")
        run.stdin.close()
        assert run.stderr.read() == b"ended"
        assert run.wait(60) == 0
