"""What may be changed so that a run needs less memory, the cheapest first. Pure: configuration to value.

No saving changes which samples are drawn and trained, but for rounding: of a quantised base, the last one,
rounding that is learnt with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotlight.config.schema import RunConfig
from spotlight.dry_run.memory_plan import PHASES, Phase, timesteps_per_pass
from spotlight.dry_run.reward_plan import shares_gpu

_ROLLOUTS: tuple[Phase, ...] = ("denoising", "decoding")
_LOADED: tuple[Phase, ...] = (*_ROLLOUTS, "training")


@dataclass(frozen=True, slots=True)
class Saving:
    """One key of the configuration.

    Attributes:
        key: ``section.name``.
        costs: in words, for the user.
        phases: whose memory it lowers.
        values: those to try after the configured one, each lower in memory than the one before.
    """

    key: str
    costs: str
    phases: Sequence[Phase]
    values: Callable[[RunConfig], Sequence[object]]

    def value(self, config: RunConfig) -> object:
        section, _, name = self.key.partition(".")
        return getattr(getattr(config, section), name)

    def applied(self, config: RunConfig, value: object) -> RunConfig:
        section, _, name = self.key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        return config.model_copy(update={section: changed})

    def override(self, config: RunConfig) -> str:
        """What sets this key to its value in ``config``, as an argument of a command."""
        return f"{self.key}={self.value(config)}"


class RewardDevices(Saving):
    """``device`` of every reward: a list is set as a whole."""

    def value(self, config: RunConfig) -> object:
        return tuple(reward.device for reward in config.rewards)

    def applied(self, config: RunConfig, value: object) -> RunConfig:
        assert isinstance(value, tuple)
        pairs = zip(config.rewards, value, strict=True)
        moved = tuple(reward.model_copy(update={"device": device}) for reward, device in pairs)
        return config.model_copy(update={"rewards": moved})

    def override(self, config: RunConfig) -> str:
        every = [reward.model_dump(mode="json", exclude_defaults=True) for reward in config.rewards]
        return f"rewards={json.dumps(every)}"


def _fewer_timesteps(config: RunConfig) -> Sequence[object]:
    several = config.learner.timesteps_per_pass == "auto" and config.trained_timesteps > 1
    return (1,) if several or timesteps_per_pass(config) > 1 else ()


def _smaller_forwards(config: RunConfig) -> Sequence[object]:
    return _halves(config.rollout.batch_size)


def _smaller_micro_batches(config: RunConfig) -> Sequence[object]:
    """Divisors of an update's samples, and of its groups where the algorithm compares their members."""
    samples = config.trained_samples // config.learner.updates_per_batch
    unit = config.trained_per_prompt if config.algorithm.compares_groups else 1
    most = min(config.learner.micro_batch_size, samples)
    return [n for n in range(unit, most, unit) if samples % n == 0][::-1]


def _more_recomputation(config: RunConfig) -> Sequence[object]:
    return {"none": ("elementwise", "blocks"), "blocks": ()}.get(str(config.learner.recompute), ("blocks",))


def _rewards_on_the_cpu(config: RunConfig) -> Sequence[object]:
    moved = tuple("cpu" if shares_gpu(config, reward) else reward.device for reward in config.rewards)
    return () if moved == tuple(reward.device for reward in config.rewards) else (moved,)


def _text_on_the_cpu(config: RunConfig) -> Sequence[object]:
    return () if config.model.text_encoder == "cpu" else ("cpu",)


def _fewer_bits(config: RunConfig) -> Sequence[object]:
    model = config.model
    if config.learner.mode != "lora" or model.compile != "none" or model.cuda_graphs:
        return ()  # they need whole weights
    return {"none": ("int8", "nf4"), "int8": ("nf4",)}.get(model.quantize, ())


def _halves(number: int) -> Sequence[int]:
    return () if number == 1 else (number // 2, *_halves(number // 2))


SAVINGS: tuple[Saving, ...] = (
    Saving("learner.timesteps_per_pass", "passes of one timestep", ("training",), _fewer_timesteps),
    Saving(
        "rollout.batch_size",
        "smaller forwards, slower where the GPU waits for the host",
        _ROLLOUTS,
        _smaller_forwards,
    ),
    Saving(
        "learner.micro_batch_size",
        "smaller passes, slower where the GPU waits for the host",
        ("training",),
        _smaller_micro_batches,
    ),
    Saving(
        "learner.recompute",
        "elementwise: little; blocks: about a third more time in updates",
        ("training",),
        _more_recomputation,
    ),
    RewardDevices(
        "rewards.device",
        "models that score run on CPU cores, while the next pictures are drawn",
        PHASES,
        _rewards_on_the_cpu,
    ),
    Saving(
        "model.text_encoder",
        "up to a minute for each prompt, once",
        ("text encoding",),
        _text_on_the_cpu,
    ),
    Saving(
        "model.quantize",
        "the base's weights are rounded: int8 by less than 1 %, nf4 by 9 %",
        _LOADED,
        _fewer_bits,
    ),
)
