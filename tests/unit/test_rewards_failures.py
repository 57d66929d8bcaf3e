"""How rewards fail: one bad sample loses only itself, and the message says what happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.unit.reward_world import ask, give_up_soon, has_ended, message, reward_modules, spec, totals

from spotlight.algorithms.advantages import advantages
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.runtime.validation import estimate
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import LARGEST, FailureKind, RewardFailure, ScoredSample, combine
from spotlight_rewards.returned_scores import RewardResultError, as_curves
from spotlight_rewards.reward import RewardScore
from spotlight_rewards.reward_config import REWARD


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with reward_modules(tmp_path):
        yield tmp_path


class TestFailures:
    @pytest.mark.parametrize(
        ("evil", "kind", "said"),
        [
            ("raise", "error", "reward 'faces' raised ValueError: no face in the picture"),
            (
                "exit",
                "error",
                "reward 'faces': its process ended with exit code 7; its last words:\nlast words",
            ),
            (
                "segfault",
                "error",
                "reward 'faces': its process was ended by SIGSEGV; its last words:\nFatal Python",
            ),
            (
                "lose the GPU",
                "error",
                "reward 'faces': its process ended with exit code 70; its last words:\nprocess ",
            ),
            ("nan", "not_finite", "reward 'faces' returned nan as 'score'; expected a finite number"),
            ("no input", "error", "the prompt has no face to look for"),
            ("sleep", "timeout", "reward 'faces': no answer within 0.5 s; it was at:\n"),
            ("hold the GIL", "timeout", "reward 'faces': no answer within 0.5 s; it was at:\n"),
        ],
    )
    def test_one_bad_sample_loses_only_itself(
        self, evil: str, kind: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kind == "timeout":
            give_up_soon(monkeypatch, evil.encode(), 0.5)
        with RewardPool([spec("faces", deadline_s=60.0, isolation_s=60.0), spec("gray")]) as pool:
            samples = ask(pool, "a", evil, "b")
            assert totals(samples) == [0.0, kind, 4.0]
            assert message(samples[1]).startswith(said), message(samples[1])
            assert totals(ask(pool, "a", "b")) == [0.0, 2.0], "the reward works on"

    def test_the_remote_traceback_tells_the_line(self) -> None:
        with RewardPool([spec("faces")]) as pool:
            (sample,) = ask(pool, "raise")
        assert 'raise ValueError("no face in the picture")' in message(sample)
        assert "faulty.py" in message(sample)

    def test_a_timeout_tells_where_it_hung(self) -> None:
        with RewardPool([spec("faces", deadline_s=1.0, retries=0)]) as pool:
            (sample,) = ask(pool, "sleep")
        assert 'faulty.py", line' in message(sample)
        assert "in faces" in message(sample)

    def test_a_stopped_process_is_killed(self) -> None:
        with RewardPool([spec("faces", deadline_s=0.1, isolation_s=0)]) as pool:
            (pid,) = pool.pids
            assert totals(ask(pool, "stop", "a")) == ["timeout", "timeout"]
            assert not psutil.pid_exists(pid)

    def test_what_a_reward_started_dies_with_it(self, workplace: Path) -> None:
        with RewardPool([spec("faces", isolation_s=0)]) as pool:
            assert totals(ask(pool, "linger")) == ["error"]
        assert has_ended(int((workplace / "lingering").read_text()))

    def test_isolation_is_bounded_in_time(self) -> None:
        with RewardPool([spec("faces", deadline_s=0.2, isolation_s=0.3)]) as pool:
            samples = ask(pool, *["sleep"] * 30)
        assert totals(samples) == ["timeout"] * 30
        assert message(samples[-1]).startswith(
            "not reached: trying 30 images one by one took more than isolation_s=0.3"
        )

    def test_without_isolation_the_batch_fails_as_a_whole(self) -> None:
        with RewardPool([spec("faces", isolation_s=0)]) as pool:
            assert totals(ask(pool, "a", "raise")) == ["error", "error"]

    def test_a_batch_is_tried_again(self) -> None:
        with RewardPool([spec("fails_once", retries=1, isolation_s=0)]) as pool:
            assert totals(ask(pool, "a", "b")) == [2.0, 2.0]
        with RewardPool([spec("fails_once", retries=0, isolation_s=0, outage_s=0)]) as pool:
            assert totals(ask(pool, "a", "b")) == ["error", "error"]

    def test_a_process_that_died_between_calls_is_replaced(self) -> None:
        with RewardPool([spec("gray", isolation_s=0)]) as pool:
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert totals(ask(pool, "a", "b")) == [0.0, 1.0]

    def test_a_result_of_the_wrong_kind_is_the_rewards_fault_not_an_images(self) -> None:
        with RewardPool([spec("one_short", retries=3)]) as pool:
            first, second = ask(pool, "a", "b")
        assert message(first).startswith("reward 'one_short' returned a result of 1 values for 2 images")
        assert first == second

    @pytest.mark.parametrize(
        ("result", "expected"),
        [
            ([1.0], "returned a result of 1 values for 2 images; expected a list of 2 numbers, one a sample"),
            (0.5, "returned a result of type 'float', 0.5; expected a list of 2 numbers"),
            (None, "returned a result of type 'NoneType', None"),
            ({1.0, 2.0}, "returned a result of type 'set'"),
            ([1.0, "0.5"], "returned a result with '0.5' of type 'str' for sample 1"),
            ([1.0, None], "returned a result with None of type 'NoneType' for sample 1"),
            ([1.0, [2.0]], "returned a result of type 'list' ("),
            (np.zeros((2, 1)), "returned a result of shape [2, 1]"),
            (
                {"strict": [1.0, 1.0]},
                "returned a dictionary with the keys ['strict']; expected 'score' among them",
            ),
            ({"score": [1.0, 1.0], "strict": [1.0]}, "returned a 'strict' of 1 values for 2 images"),
            ({"score": [1.0, 1.0], 7: [1.0, 1.0]}, "returned a dictionary with the keys ['score', 7]"),
        ],
    )
    def test_a_result_of_the_wrong_kind_is_named(self, result: object, expected: str) -> None:
        with pytest.raises(RewardResultError) as error:
            as_curves(result, 2)
        assert expected in str(error.value)

    @pytest.mark.parametrize("result", [[1, 0.5], (True, np.float16(0.5)), np.array([1, 0.5], np.float32)])
    def test_numbers_of_any_type_are_fine(self, result: object) -> None:
        assert as_curves(result, 2) == {"score": [1.0, 0.5]}

    def test_a_sum_that_overflows_is_not_finite(self) -> None:
        with RewardPool([spec("huge", weight=10.0)]) as pool:
            (sample,) = ask(pool, "a")
        assert sample == RewardFailure(FailureKind.NOT_FINITE, "reward", message(sample))
        assert "10 x 1e+308 (huge)" in message(sample)

    @pytest.mark.parametrize(("value", "detail"), [(-1e200, 0.0), (1.0, 1e200)])
    def test_a_figure_whose_square_overflows_is_a_failure_of_its_sample(
        self, value: float, detail: float
    ) -> None:
        found = combine({"huge": spec("huge")}, {"huge": RewardScore(value, {"area": detail})})
        assert isinstance(found, RewardFailure)
        assert found.kind is FailureKind.NOT_FINITE
        assert "e+200; expected at most 1e+100" in found.message

    def test_the_largest_figures_have_a_mean_a_spread_and_advantages(self) -> None:
        highest, lowest = ({REWARD: sign * LARGEST} for sign in (1, -1))
        assert estimate([LARGEST, -LARGEST]).stderr == pytest.approx(LARGEST)
        ((up, down),) = advantages([[highest, lowest]], {REWARD: 1.0}, AdvantageConfig())
        assert up == -down == pytest.approx(1.0, rel=0.5)

    def test_what_rewards_print_can_be_kept(self, workplace: Path) -> None:
        (workplace / "logs").mkdir()
        for before in (True, False):
            with RewardPool([spec("faces")], workers=2) as pool:
                if before:
                    pool.log_to(workplace / "logs")
                ask(pool, "exit")
                pool.log_to(workplace / "logs")
        (log,) = (workplace / "logs").iterdir()
        assert log.name == "reward-faces-0.log"
        assert log.read_text() == "last words\nlast words\n"

    def test_a_log_that_cannot_be_written_does_not_stop_the_scoring(self, workplace: Path) -> None:
        with RewardPool([spec("faces")]) as pool:
            (workplace / "pipe").mkdir()
            os.mkfifo(workplace / "pipe" / "reward-faces-0.log")
            for place in ("nowhere", "pipe"):
                pool.log_to(workplace / place)
                ask(pool, "exit")
            (sample,) = ask(pool, "a")
        assert isinstance(sample, ScoredSample)
