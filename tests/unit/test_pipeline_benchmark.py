"""The arithmetic of ``benchmarks/_pipeline_ray.py``, and that its modes are configurations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from benchmarks import _pipeline_ray as bench
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import load_config
from spotlight.config.sections.learner_section import batch_problems
from spotlight.scheduler.types import Phase

SECONDS = st.floats(0.1, 1000)
RUN = bench.RayRun(bench.SYNCHRONOUS, 0, 4.0, 6.0, 2.0, 0.5, (0.5, 0.7), (0.9, 0.8), 0, 0, 0, 40.0)


@given(SECONDS, SECONDS)
def test_no_overlap_beats_the_ceiling(generation_s: float, training_s: float) -> None:
    apart, together = (bench.ceiling(generation_s, training_s, trainers) for trainers in (False, True))
    assert 1 <= apart <= 2
    assert together >= apart - 1e-9, "more slots that generate take no longer"
    # No more work is done in a second than all slots do.
    slots = bench.ROLLOUT_SLOTS + bench.RANKS
    synchronous_s = generation_s / bench.ROLLOUT_SLOTS + training_s / bench.RANKS
    assert synchronous_s / together * slots >= (generation_s + training_s) * (1 - 1e-9)


def test_the_ceiling_of_equal_phases_is_two() -> None:
    assert bench.ceiling(2.0 * bench.ROLLOUT_SLOTS, 2.0 * bench.RANKS, False) == pytest.approx(2)


@given(SECONDS, SECONDS)
def test_slots_that_all_do_both_in_turn_are_never_idle(generation_s: float, training_s: float) -> None:
    together = bench.ceiling(generation_s, training_s, True, bench.SLOTS)
    assert together == pytest.approx(2), "half of the slots wait in each of the synchronous phases"


def test_modes_add_up_and_are_configurations() -> None:
    modes = bench.modes()
    added, alone, together = modes[:6], modes[6:-1], modes[-1]
    assert (together.name, together.ranks) == ("colocated", bench.SLOTS)
    assert [mode.name for mode in added] == ["synchronous", "+GAP", "+TSP", "+TAG", "+TCSS", "+exploration"]
    assert [mode.name for mode in alone] == ["TSP", "TAG", "TCSS", "exploration"]
    for before, after in itertools.pairwise(added):
        assert after.overrides[: len(before.overrides)] == before.overrides
    for mode in modes:
        config = load_config(None, [*bench.SETTINGS, *mode.overrides])
        assert list(batch_problems(config, mode.ranks)) == []
        assert config.fleet.learner_ranks == mode.ranks
        assert config.pipeline.trainers_generate == mode.trainers
        if mode is added[-1]:
            assert config.pipeline.next_share > 0
            assert config.exploration is not None


def test_ratios_are_of_the_same_seed() -> None:
    runs = [
        RUN,
        replace(RUN, run_seed=1, samples_per_s=2.0),
        replace(RUN, mode="+GAP", samples_per_s=6.0),
        replace(RUN, mode="+GAP", run_seed=1, samples_per_s=3.0, validations=(0.5, 0.8)),
    ]
    synchronous, gap = bench.summarise(runs)
    assert (synchronous["ratio"], gap["ratio"], gap["ratio_stderr"]) == (1.0, 1.5, 0.0)
    assert gap["samples_per_s"] == 4.5
    assert gap["validation"] == pytest.approx(0.75)
    assert gap["validation_stderr"] == pytest.approx(0.05)
    assert Phase.ROLLOUT.value == "rollout"
    assert Phase.TRAINING.value == "training"
    assert Phase.IDLE.value == "idle"


def test_learning_is_compared_validation_by_validation_and_loss_by_loss() -> None:
    base = [replace(RUN, run_seed=seed, validations=(0.5, 0.7 + seed / 10)) for seed in range(3)]
    same = [replace(one, mode="+GAP") for one in base]
    assert bench.outside(same, base) == 0
    near = [replace(one, mode="+TSP", validations=(0.5, one.validations[1] - 0.1)) for one in base]
    far = [replace(one, mode="+TAG", validations=(0.5, one.validations[1] - 0.4)) for one in base]
    assert (bench.outside(near, base), bench.outside(far, base)) == (0, 1)
    assert bench.outside(far, []) is None
    assert bench.outside(far[:1], base) is None
    other = [replace(one, mode="+TCSS", losses=(0.9, one.run_seed / 10)) for one in base]
    runs = [*base, *same, *other]
    assert [bench.learns_as(mode, runs) for mode in ("+GAP", "+TCSS")] == [bench.SYNCHRONOUS, "+TCSS"]
