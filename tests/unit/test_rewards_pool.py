"""Rewards run in processes of their own: what they return, how they fail, and that nothing is left behind."""

from __future__ import annotations

import gc
import hashlib
import os
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
from tests.unit.reward_world import ask, give_up_soon, has_ended, pictures, reward_modules, spec, totals

from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.reward_process import PoolClosedError
from spotlight_rewards.results import RewardFailure, ScoredSample
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with reward_modules(tmp_path):
        yield tmp_path


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
        with RewardPool([spec("slow", deadline_s=900.0)]) as pool:
            assert totals(pool.submit(pictures(7), ["a"], [{"sleep_s": 0.0}]).result().samples) == [7.0]
            assert not pool.submit(pictures(7), ["a"], [{"sleep_s": 900.0}]).done()

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


class TestCheck:
    def test_every_reward_sees_the_prompts_and_its_params(self) -> None:
        with RewardPool(
            [spec("gray"), RewardConfig(name="checked:reward_of_quotes", params={"word": "SALE"})]
        ) as pool:
            pool.check(["a SALE"], [{}])
            (sample,) = ask(pool, "a SALE")
            assert isinstance(sample, ScoredSample)
            scorers = {name: score.scored_by for name, score in sample.scores.items()}
            code = Path("faulty.py").read_bytes()
            assert scorers == {
                "gray": f"code of faulty.py@{hashlib.sha256(code).hexdigest()}",
                "reward_of_quotes": "a reader of SALE",
            }
            with pytest.raises(RewardInputError, match="prompt 'OPEN' lacks 'SALE'"):
                pool.check(["a SALE", "OPEN"], [{}, {}])

    def test_a_check_that_fails_itself_is_no_input_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        give_up_soon(monkeypatch, b"hang", 1.0)
        reward = RewardConfig(name="checked:reward_of_quotes", params={"word": "OPEN"})
        with RewardPool([reward]) as pool:
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

    def test_closing_ends_what_is_under_way(self, workplace: Path) -> None:
        pool = RewardPool([spec("faces", deadline_s=900.0)])
        running = pool.submit(pictures(0), ["sleep"], [{}])
        waiting = pool.submit(pictures(0), ["a"], [{}])
        while not (workplace / "asleep").exists():
            time.sleep(0.01)
        pool.close()
        for pending in (running, waiting):
            with pytest.raises(PoolClosedError):
                pending.result(timeout=60)
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
            import os, time
            import numpy as np
            from spotlight_rewards.pool.reward_pool import RewardPool
            from spotlight_rewards.reward_config import RewardConfig
            pool = RewardPool([RewardConfig(name="faulty:faces")], workers=2)
            if {busy}:
                pool.submit([np.zeros((1, 1, 3), np.uint8)], ["sleep"], [{{}}])
                while not os.path.exists("asleep"):
                    time.sleep(0.01)
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
