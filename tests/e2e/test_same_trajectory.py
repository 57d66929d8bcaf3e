"""Settings that must not change what is learnt do not."""

from __future__ import annotations

import pytest
from main_job import ALGORITHMS, NFT, ONE_AT_ONCE, Job, Straight, clean_audit, largest_difference, outcome

WEIGHT_TOLERANCE = 2e-5
"""Largest difference of a LoRA weight after two iterations; measured: 1.5e-6, of weights up to 2e-3."""
CALM = ("iterations=2", "learner.learning_rate=0.001", "rewards=[{name: 'reward_functions:moody'}]")
ROUNDING = {
    "micro-batches": ("learner.micro_batch_size=1",),
    "rollout batches": ("rollout.batch_size=4",),
    "timesteps in a pass": ("learner.timesteps_per_pass=auto",),
    "checkpointed activations": ("learner.recompute=blocks",),
    "every second block recomputed": ("learner.recompute=2",),
    "attention as plain products": ("model.attention=math",),
}
TOGETHER = tuple(setting for settings in ROUNDING.values() for setting in settings)


@pytest.mark.parametrize("algorithm", ONE_AT_ONCE)
@pytest.mark.parametrize(
    "setting", ["together", *(pytest.param(name, marks=pytest.mark.slow) for name in ROUNDING)]
)
def test_the_same_but_for_rounding(job: Job, algorithm: str, setting: str) -> None:
    number = list(ALGORITHMS).index(algorithm)
    plain, other = job.root / f"calm-{number}", job.root / f"{setting.replace(' ', '-')}-{number}"
    job.train(plain.name, *ALGORITHMS[algorithm], *CALM)  # at once, from the second time on
    job.train(other.name, *ALGORITHMS[algorithm], *CALM, *ROUNDING.get(setting, TOGETHER))
    assert largest_difference(plain, other) <= WEIGHT_TOLERANCE
    ours, theirs = clean_audit(plain).counts, clean_audit(other).counts
    assert ours == theirs
    for one, two in zip(outcome(plain).validation, outcome(other).validation, strict=True):
        assert one[2] == pytest.approx(two[2], abs=1e-5)


def test_the_same_to_the_bit_whenever_it_is_saved_and_wherever_curves_go(
    job: Job, straight: Straight
) -> None:
    _, expected, _ = straight("diffusion-nft with EMA")
    rarely = ("checkpoint.every=3", "checkpoint.keep=1", "metrics.tensorboard=true", "fleet.price_usd_h=2")
    job.train("rarely", *NFT, *rarely)
    assert outcome(job.root / "rarely") == expected
    assert list((job.root / "rarely" / "tensorboard").iterdir())
