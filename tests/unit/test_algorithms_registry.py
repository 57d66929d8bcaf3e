from __future__ import annotations

import pytest

from spotlight.algorithms import build_algorithm
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.config.sections.algorithm import (
    DiffusionNFTConfig,
    FlowGRPOConfig,
    FlowGRPOFastConfig,
    OldPolicyConfig,
)
from spotlight.diffusion.samplers import CPS, ODE, FlowSDE, Sampler
from spotlight.registry import ALGORITHMS

SUITABLE: dict[str, Sampler] = {
    name: ODE() if ALGORITHMS.load(name)().learns_from_clean_samples else FlowSDE() for name in ALGORITHMS
}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_section_names_an_algorithm_that_is_built_with_its_defaults(name: str) -> None:
    built = build_algorithm(ALGORITHMS.load(name)(), SUITABLE[name])
    assert built.name == name
    assert built.sampler == SUITABLE[name]
    assert built.keeps in ("trajectory", "final", "query")
    assert built.timesteps(5) >= 1
    assert built.config.uses_old_policy == ("old" in built.extra_slots)
    assert built.config.uses_reference == ("reference" in built.extra_slots)
    assert built.config.learns_from_clean_samples == (built.keeps != "trajectory")
    assert built.config.needs_gradients == (built.keeps == "query")
    assert built.config.shares_draws or not built.config.compares_groups
    assert (built.old_decay(1) is None) == ("old" not in built.extra_slots)
    assert built.rollout_slot in ("policy", *built.extra_slots)


def test_an_algorithm_takes_its_section_of_the_configuration() -> None:
    grpo = build_algorithm(FlowGRPOConfig(clip_range=1e-3, kl_weight=0.04), FlowSDE(0.7))
    assert isinstance(grpo, FlowGRPO)
    assert (grpo.config.clip_range, grpo.extra_slots) == (1e-3, ("reference",))
    fast = build_algorithm(FlowGRPOFastConfig(train_timesteps=2), CPS(0.8))
    assert isinstance(fast, FlowGRPO)
    assert (fast.config.clip_range, fast.config.kl_weight, fast.timesteps(3)) == (1e-5, 0, 2)
    nft = build_algorithm(DiffusionNFTConfig(beta=0.1, old_policy=OldPolicyConfig(slope=0.02)), ODE())
    assert nft.old_decay(3) == pytest.approx(0.06)


@pytest.mark.parametrize(
    "bad", [{"clip_range": 0.0}, {"kl_weight": -1.0}, {"old_log_probs": "ema"}, {"train_timesteps": 0}]
)
def test_mistakes_name_the_field(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FlowGRPOConfig(**bad)  # type: ignore[arg-type]
