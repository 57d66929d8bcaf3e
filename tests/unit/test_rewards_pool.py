"""Rewards run in processes of their own: what they return, how they fail, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import numpy as np
import psutil
import pytest

from spotlight.config.sections.rewards import RewardConfig
from spotlight.rewards.pool.reward_pool import RewardPool
from spotlight.rewards.pool.reward_process import PoolClosedError
from spotlight.rewards.pool.reward_worker import RewardResultError, as_curves
from spotlight.rewards.results import FailureKind, RewardFailure, ScoredSample
from spotlight.rewards.reward import Image, RewardInputError, RewardSetupError

REWARDS = '''
import ctypes, os, subprocess, sys, threading, time

from spotlight.rewards.reward import RewardInputError

calls = 0

def gray(images, prompts, metadata):
    """The picture's first byte."""
    return [int(image[0, 0, 0]) for image in images]

def batch_size(images, prompts, metadata):
    return [float(len(images)) for _ in images]

def detailed(images, prompts, metadata, *, factor=2.0):
    values = gray(images, prompts, metadata)
    return {"score": [factor * v for v in values], "strict": [v > 3 for v in values]}

def faces(images, prompts, metadata):
    """Does to each sample what its prompt says; the metadata's number is the score."""
    for prompt in prompts:
        if prompt == "raise":
            raise ValueError("no face in the picture")
        if prompt == "sleep":
            time.sleep(60)
        if prompt == "hold the GIL":
            ctypes.PyDLL(None).sleep(60)
        if prompt == "exit":
            print("last words", flush=True)
            os._exit(7)
        if prompt == "segfault":
            ctypes.string_at(0)
        if prompt == "stop":
            os.kill(os.getpid(), 19)
        if prompt == "linger":
            child = subprocess.Popen(["sleep", "60"])
            with open("lingering", "w") as file:
                file.write(str(child.pid))
            os._exit(7)
        if prompt == "no input":
            raise RewardInputError("the prompt has no face to look for")
    return [float("nan") if p == "nan" else m["value"] for p, m in zip(prompts, metadata)]

def fails_once(images, prompts, metadata):
    global calls
    calls += 1
    if calls == 1:
        raise ConnectionError("the service is busy")
    return [float(calls)] * len(images)

def modules(images, prompts, metadata):
    torch = float("torch" in sys.modules)
    return {"score": [torch], "modules": [len(sys.modules)], "pid": [os.getpid()]}

def one_short(images, prompts, metadata):
    return [1.0] * (len(images) - 1)

def as_array(images, prompts, metadata):
    import numpy as np
    return np.array(gray(images, prompts, metadata), dtype=np.float32)

def huge(images, prompts, metadata):
    return [1e308] * len(images)

def slow(images, prompts, metadata):
    time.sleep(metadata[0]["sleep_s"])
    return gray(images, prompts, metadata)
'''

CHECKED = """
import time
from spotlight.rewards.reward import RewardInputError

def reward_of_quotes(images, prompts, metadata, *, word="OPEN"):
    return [1.0] * len(images)

def check(prompts, metadata, *, word="OPEN"):
    for prompt in prompts:
        if prompt == "bug":
            raise KeyError("oops")
        if prompt == "hang":
            time.sleep(60)
        if word not in prompt:
            raise RewardInputError(f"prompt {prompt!r} lacks {word!r}")

def scored_by(*, word):
    return f"a reader of {word.upper()}"
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the reward modules, as a user's."""
    (tmp_path / "faulty.py").write_text(REWARDS)
    (tmp_path / "checked.py").write_text(CHECKED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    gc.collect()
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


def pictures(*values: int) -> list[Image]:
    return [np.full((4, 4, 3), value, np.uint8) for value in values]


def ask(pool: RewardPool, *prompts: str) -> tuple[ScoredSample | RewardFailure, ...]:
    metadata = [{"value": float(index)} for index in range(len(prompts))]
    return pool.score(pictures(*range(len(prompts))), prompts, metadata).samples


def totals(samples: tuple[ScoredSample | RewardFailure, ...]) -> list[float | str]:
    return [each.total if isinstance(each, ScoredSample) else each.kind.value for each in samples]


def spec(function: str, **changes: object) -> RewardConfig:
    return RewardConfig(name=f"faulty:{function}", **{"deadline_s": 5.0, "retries": 0, **changes})  # type: ignore[arg-type]


def message(sample: ScoredSample | RewardFailure) -> str:
    assert isinstance(sample, RewardFailure), sample
    return sample.message


def has_ended(pid: int) -> bool:
    """Whether a killed process is gone within a moment: signals are not waited for, except the pool's own."""
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:  # of whom init takes care
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


class TestScores:
    def test_the_total_is_the_weighted_sum_and_every_part_has_its_curve(self) -> None:
        specs = [spec("gray", weight=0.5), spec("detailed", weight=-1.0, params={"factor": 3.0})]
        with RewardPool(specs) as pool:
            batch = pool.score(pictures(2, 4), ["a", "b"], [{}, MappingProxyType({"read": "only"})])
        first, second = batch.samples
        assert isinstance(first, ScoredSample)
        assert isinstance(second, ScoredSample)
        assert first.curves() == {"reward": -5.0, "gray": 2.0, "detailed": 6.0, "detailed/strict": 0.0}
        assert second.curves() == {"reward": -10.0, "gray": 4.0, "detailed": 12.0, "detailed/strict": 1.0}
        assert not batch.failures
        assert batch.wall_s.keys() == {"gray", "detailed"}

    def test_a_batch_is_one_call_and_arrays_are_fine(self) -> None:
        with RewardPool([spec("batch_size"), spec("as_array")], workers=2) as pool:
            assert totals(ask(pool, "a", "b", "c")) == [3.0, 4.0, 5.0]
            assert ask(pool) == ()

    def test_results_belong_to_their_batch_whatever_the_number_of_workers(self) -> None:
        with RewardPool([spec("slow"), spec("gray", weight=10.0)], workers=3) as pool:
            pending = []
            for index in range(9):  # the earlier, the slower
                metadata = [{"sleep_s": 0.1 if index < 2 else 0.0}] * 2
                pending.append(pool.submit(pictures(index, 100 + index), ["a", "b"], metadata))
            found = [totals(each.result().samples) for each in pending]
        assert found == [[11.0 * index, 11.0 * (100 + index)] for index in range(9)]

    def test_submitting_does_not_wait(self) -> None:
        with RewardPool([spec("slow")]) as pool:
            started_s = time.monotonic()
            pending = pool.submit(pictures(7), ["a"], [{"sleep_s": 0.2}])
            assert time.monotonic() - started_s < 0.15
            assert not pending.done()
            assert totals(pending.result().samples) == [7.0]

    def test_the_process_holds_no_torch_and_dies_with_the_pool(self) -> None:
        with RewardPool([spec("modules")]) as pool:
            (sample,) = ask(pool, "a")
            assert isinstance(sample, ScoredSample)
            assert sample.total == 0.0, "torch was imported"
            assert sample.scores["modules"].details["modules"] < 400
            assert pool.pids == (int(sample.scores["modules"].details["pid"]),)
            assert pool.pids != (os.getpid(),)
        assert pool.pids == ()

    @pytest.mark.parametrize(
        ("images", "prompts", "expected"),
        [
            (pictures(1, 2), ["a"], "2 images, 1 prompts"),
            ([np.zeros((4, 4, 3), np.float32)], ["a"], r"image 0 is float32 \[4, 4, 3\]"),
            ([np.zeros((4, 4), np.uint8)], ["a"], r"image 0 is uint8 \[4, 4\]"),
            (["cat.png"], ["a"], "image 0 is str"),
        ],
    )
    def test_pictures_of_another_kind_are_refused(
        self, images: list[Image], prompts: list[str], expected: str
    ) -> None:
        with RewardPool([spec("gray")]) as pool, pytest.raises(ValueError, match=expected):
            pool.submit(images, prompts, [{} for _ in prompts])

    def test_metadata_that_cannot_travel_is_named(self) -> None:
        with RewardPool([spec("gray")]) as pool:
            with pytest.raises(ValueError, match="plain values"):
                pool.score(pictures(1), ["a"], [{"draw": lambda: None}])
            assert totals(ask(pool, "a")) == [0.0]


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
            ("nan", "not_finite", "reward 'faces' returned nan as 'score'; expected a finite number"),
            ("no input", "error", "the prompt has no face to look for"),
            ("sleep", "timeout", "reward 'faces': no answer within 0.5 s; it was at:\n"),
            ("hold the GIL", "timeout", "reward 'faces': no answer within 0.5 s; it was at:\n"),
        ],
    )
    def test_one_bad_sample_loses_only_itself(self, evil: str, kind: str, said: str) -> None:
        deadline_s = 0.5 if kind == "timeout" else 20.0
        with RewardPool([spec("faces", deadline_s=deadline_s, isolation_s=20.0), spec("gray")]) as pool:
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
        with RewardPool([spec("faces", deadline_s=0.2)]) as pool:
            (sample,) = ask(pool, "sleep")
        assert 'faulty.py", line' in message(sample)
        assert "in faces" in message(sample)

    def test_a_stopped_process_is_killed(self) -> None:
        with RewardPool([spec("faces", deadline_s=0.1, isolation_s=0)]) as pool:
            (pid,) = pool.pids
            started_s = time.monotonic()
            assert totals(ask(pool, "stop", "a")) == ["timeout", "timeout"]
            assert time.monotonic() - started_s < 3
            assert not psutil.pid_exists(pid)

    def test_what_a_reward_started_dies_with_it(self, workplace: Path) -> None:
        with RewardPool([spec("faces", isolation_s=0)]) as pool:
            assert totals(ask(pool, "linger")) == ["error"]
        assert has_ended(int((workplace / "lingering").read_text()))

    def test_isolation_is_bounded_in_time(self) -> None:
        with RewardPool([spec("faces", deadline_s=0.2, isolation_s=0.3)]) as pool:
            started_s = time.monotonic()
            samples = ask(pool, *["sleep"] * 30)
            assert time.monotonic() - started_s < 4
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
        with RewardPool([spec("fails_once", retries=0, isolation_s=0)]) as pool:
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
            pool.log_to(workplace / "nowhere")
            ask(pool, "exit")
            (sample,) = ask(pool, "a")
        assert isinstance(sample, ScoredSample)


class TestCheck:
    def test_every_reward_sees_the_prompts_and_its_params(self) -> None:
        with RewardPool(
            [spec("gray"), RewardConfig(name="checked:reward_of_quotes", params={"word": "SALE"})]
        ) as pool:
            pool.check(["a SALE"], [{}])
            (sample,) = ask(pool, "a SALE")
            assert isinstance(sample, ScoredSample)
            told = {name: score.scored_by for name, score in sample.scores.items()}
            assert told == {"gray": "", "reward_of_quotes": "a reader of SALE"}
            with pytest.raises(RewardInputError, match="prompt 'OPEN' lacks 'SALE'"):
                pool.check(["a SALE", "OPEN"], [{}, {}])

    def test_a_check_that_fails_itself_is_no_input_error(self) -> None:
        reward = RewardConfig(name="checked:reward_of_quotes", params={"word": "OPEN"})
        with RewardPool([reward], start_deadline_s=1.0) as pool:
            with pytest.raises(RewardSetupError, match="check of reward 'reward_of_quotes' raised KeyError"):
                pool.check(["bug"], [{}])
            with pytest.raises(
                RewardSetupError, match="check of reward 'reward_of_quotes' failed: no answer within 1"
            ) as error:
                pool.check(["hang"], [{}])
            assert "Raise reward_policy.start_deadline_s" in str(error.value)
            pool.check(["OPEN"], [{}])


class TestStartAndEnd:
    def test_a_reward_that_cannot_tell_what_scores_does_not_start(self) -> None:
        with pytest.raises(
            RewardSetupError, match="'checked:reward_of_quotes': its scored_by raised"
        ) as error:
            RewardPool([RewardConfig(name="checked:reward_of_quotes", params={"word": 3})])
        assert "'int' object has no attribute 'upper'" in str(error.value)

    def test_a_reward_that_would_be_scored_by_something_else_after_a_restart_fails(
        self, workplace: Path
    ) -> None:
        (workplace / "moody.py").write_text(
            "from pathlib import Path\n"
            "def scored_by(): return Path('weights').read_text()\n"
            "def f(images, prompts, metadata):\n"
            "    assert prompts != ['exit'] or exit()\n"
            "    return [1.0] * len(images)\n"
        )
        (workplace / "weights").write_text("old")
        with RewardPool([RewardConfig(name="moody:f", retries=0)]) as pool:
            assert pool.scored_by == {"f": "old"}
            ask(pool, "exit")
            assert isinstance(ask(pool, "a")[0], ScoredSample)
            (workplace / "weights").write_text("new")
            ask(pool, "exit")
            (sample,) = ask(pool, "a")
        assert isinstance(sample, RewardFailure)
        assert "was scored by 'old', and after a restart would be by 'new'" in sample.message

    def test_a_reward_that_cannot_be_loaded_leaves_nothing_running(self) -> None:
        with pytest.raises(RewardSetupError, match="no module 'nowhere'"):
            RewardPool([spec("gray"), RewardConfig(name="nowhere:reward_of")])

    def test_a_reward_that_ends_its_process_at_import(self, workplace: Path) -> None:
        (workplace / "quitter.py").write_text("import sys\nprint('no licence')\nsys.exit(3)\n")
        with pytest.raises(
            RewardSetupError, match="'f' did not start: its process ended with exit code 3"
        ) as error:
            RewardPool([RewardConfig(name="quitter:f")])
        assert "no licence" in str(error.value)

    def test_a_start_that_takes_too_long_names_what_to_do(self, workplace: Path) -> None:
        (workplace / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
        with pytest.raises(
            RewardSetupError, match=r"reward 'f' did not start: no answer within 0\.3 s"
        ) as error:
            RewardPool([RewardConfig(name="sleeper:f")], start_deadline_s=0.3)
        assert "Raise reward_policy.start_deadline_s" in str(error.value)
        assert "`hf download`" in str(error.value)

    def test_names_must_differ(self) -> None:
        with pytest.raises(ValueError, match="2 rewards are called 'gray'"):
            RewardPool([spec("gray"), spec("gray")])
        with RewardPool([spec("gray"), spec("gray", label="again")]) as pool:
            assert pool.names == ("gray", "again")
        with pytest.raises(ValueError, match="no rewards"):
            RewardPool([])

    def test_closing_ends_what_is_under_way(self) -> None:
        pool = RewardPool([spec("faces", deadline_s=60.0)])
        running = pool.submit(pictures(0), ["sleep"], [{}])
        waiting = pool.submit(pictures(0), ["a"], [{}])
        time.sleep(0.1)
        pool.close()
        for pending in (running, waiting):
            with pytest.raises(PoolClosedError):
                pending.result(timeout=1)
        with pytest.raises(PoolClosedError):
            pool.submit(pictures(0), ["a"], [{}])
        pool.close()

    def test_a_forgotten_pool_ends(self) -> None:
        pool = RewardPool([spec("gray")])
        (pid,) = pool.pids
        del pool
        gc.collect()
        assert not psutil.pid_exists(pid)

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a call"])
    def test_processes_end_when_their_parent_is_killed(self, workplace: Path, busy: bool) -> None:
        script = textwrap.dedent(f"""
            import time
            import numpy as np
            from spotlight.rewards.pool.reward_pool import RewardPool
            from spotlight.config.sections.rewards import RewardConfig
            pool = RewardPool([RewardConfig(name="faulty:faces")], workers=2)
            if {busy}:
                pool.submit([np.zeros((1, 1, 3), np.uint8)], ["sleep"], [{{}}])
                time.sleep(0.1)
            print(*pool.pids, flush=True)
            time.sleep(60)
        """)
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        with parent, parent.stdout as output:
            workers = [int(pid) for pid in output.readline().split()]
            parent.kill()
        assert len(workers) == 2
        assert all(has_ended(pid) for pid in workers)
