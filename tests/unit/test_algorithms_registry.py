from __future__ import annotations

import pytest

from spotlight.algorithms import ALGORITHMS, build_algorithm
from spotlight.algorithms.diffusion_nft import DiffusionNFT
from spotlight.algorithms.flow_grpo import FlowGRPO
from spotlight.algorithms.forward_process import OldPolicy
from spotlight.diffusion.samplers import CPS, ODE, FlowSDE, Sampler

SUITABLE: dict[str, Sampler] = {name: FlowSDE() for name in ALGORITHMS} | {
    "diffusion-nft": ODE(),
    "awm": ODE(),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built_by_its_name_with_its_defaults(name: str) -> None:
    built = build_algorithm(name, SUITABLE[name], {})
    assert built.name == name
    assert built.sampler == SUITABLE[name]
    assert built.keeps in ("trajectory", "final")
    assert built.timesteps(5) >= 1
    assert (built.old_decay(1) is None) == ("old" not in built.extra_slots)
    assert built.rollout_slot in ("policy", *built.extra_slots)


def test_parameters_are_plain_values() -> None:
    grpo = build_algorithm("flow-grpo", FlowSDE(0.7), {"clip_range": 1e-3, "kl_weight": 0.04})
    assert isinstance(grpo, FlowGRPO)
    assert (grpo.params.clip_range, grpo.params.kl_weight) == (1e-3, 0.04)
    fast = build_algorithm("flow-grpo-fast", CPS(0.8), {"train_timesteps": 2})
    assert isinstance(fast, FlowGRPO)
    assert (fast.params.clip_range, fast.params.kl_weight, fast.timesteps(3)) == (1e-5, 0, 2)
    nft = build_algorithm("diffusion-nft", ODE(), {"beta": 0.1, "old_policy": {"slope": 0.02}})
    assert isinstance(nft, DiffusionNFT)
    assert (nft.params.beta, nft.params.old_policy) == (0.1, OldPolicy(slope=0.02))


def test_mistakes_name_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'ppo'; expected one of flow-grpo, "):
        build_algorithm("ppo", ODE(), {})
    with pytest.raises(
        ValueError, match="unknown parameter 'clip' of flow-grpo; expected one of clip_range, "
    ):
        build_algorithm("flow-grpo", FlowSDE(), {"clip": 1.0})
    with pytest.raises(ValueError, match="unknown parameter 'rate' of diffusion-nft's old_policy"):
        build_algorithm("diffusion-nft", ODE(), {"old_policy": {"rate": 1.0}})
    with pytest.raises(ValueError, match="expected a mapping"):
        build_algorithm("diffusion-nft", ODE(), {"old_policy": 0.5})
    for bad in ({"clip_range": 0.0}, {"kl_weight": -1.0}, {"old_log_probs": "ema"}, {"train_timesteps": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            build_algorithm("flow-grpo", FlowSDE(), bad)
