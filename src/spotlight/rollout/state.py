"""Rollouts in progress and finished, as immutable values.

A step creates a new :class:`RolloutState`, so a failed step leaves the old one valid. A state has everything
needed to continue elsewhere, except noise, which is a function of the rollout's seed and the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from spotlight.diffusion.samplers import Sampler
from spotlight.diffusion.schedule import SdeWindow
from spotlight.models.condition import Condition
from spotlight.models.media import MediaSize
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Purpose, Rollout, group_of

_FORMAT = 7
CONDITION = "condition."
"""Begins the names of a condition's tensors among those of a state."""

Added: TypeAlias = Mapping[str, Tensor]
"""What the blocks after the first added to one rollout's image tokens, [tokens, width], by guidance pass."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How rollouts are denoised.

    Attributes:
        size: of the pictures or videos.
        sampler: for the steps inside the SDE window; all others are ODE steps.
        window: the stochastic steps; None if and only if the sampler is deterministic.
        guidance_scale: true classifier-free guidance; 1 or less means none.
        embedded_guidance: input of a guidance-distilled model; None for others.
        keeps: the states around the stochastic steps, or x0 alone, of shorter previews always x0 alone; or
            the states around the last step.
        schedule_steps: steps of the schedule of which rollouts take the first levels, and then go straight
            to 0; None: they take all.
        path_steps: steps of the rollouts whose seeds the previews choose; shorter previews follow their
            coarsened noise path (:mod:`spotlight.diffusion.brownian`). None: no previews, or an ODE.
        step_cache: run all transformer blocks once per this many steps and reuse their residuals in between
            (:mod:`spotlight.rollout.step_cache`); 1: no reuse. Previews only.
        autocast: dtype of the transformer's matrix products; None: the engine's. Previews only.
        group_noise: seed of the initial noise that the samples of a group share; None: each has its own.
    """

    size: MediaSize
    sampler: Sampler
    window: SdeWindow | None
    guidance_scale: float
    keeps: Literal["trajectory", "final", "query"]
    embedded_guidance: float | None = None
    path_steps: int | None = None
    step_cache: int = 1
    autocast: torch.dtype | None = None
    group_noise: int | None = None
    schedule_steps: int | None = None

    def __post_init__(self) -> None:
        if self.sampler.stochastic != (self.window is not None):
            raise ValueError(
                f"sampler {self.sampler} with SDE window {self.window}: a stochastic sampler needs a window "
                "and the ODE takes none"
            )
        if self.keeps == "trajectory" and self.window is None:
            raise ValueError(
                f"keeps 'trajectory' with sampler {self.sampler}: an ODE has no stochastic steps to keep; "
                "use flow_sde, cps or dance with a noise level above 0, or keeps 'final'"
            )
        if self.path_steps is not None and self.window is None:
            raise ValueError(
                f"path_steps {self.path_steps} with sampler {self.sampler}: expected a stochastic sampler; "
                "an ODE's path is its initial noise"
            )
        if self.step_cache < 1 or (self.keeps == "trajectory" and self.approximate):
            raise ValueError(
                f"step_cache {self.step_cache}, autocast {self.autocast} with keeps {self.keeps!r}: expected "
                "a step_cache of at least 1, and neither where a trajectory is kept: replay would differ"
            )
        if self.group_noise is not None and self.window is None:
            raise ValueError(
                f"group_noise {self.group_noise} with sampler {self.sampler}: the samples of a group would "
                "be equal; expected a stochastic sampler"
            )

    @property
    def approximate(self) -> bool:
        """Whether velocities are approximated, which is acceptable for previews only."""
        return self.step_cache > 1 or self.autocast is not None

    def preview(
        self,
        steps: int,
        guidance_scale: float | None = None,
        *,
        keeps: Literal["trajectory", "final", "query"] = "final",
        step_cache: int = 1,
        autocast: torch.dtype | None = None,
    ) -> Recipe:
        """The recipe for previews of this recipe's rollouts, which have ``steps`` steps.

        Args:
            guidance_scale: of the previews; None: unchanged.
            keeps: of previews with all of these steps.
        """
        return dataclasses.replace(
            self,
            guidance_scale=self.guidance_scale if guidance_scale is None else guidance_scale,
            keeps=keeps,
            path_steps=None if self.window is None else steps,
            step_cache=step_cache,
            autocast=autocast,
        )

    def initial_seed(self, rollout: Rollout) -> int:
        """Seed of a rollout's initial noise: its own, or one of all rollouts of its group."""
        if self.group_noise is None:
            return rollout.seed
        return derive_seed(self.group_noise, "initial noise", group_of(rollout))

    def coarse_path(self, rollout: Rollout) -> int | None:
        """Steps of the noise path that a shorter preview follows; None for other rollouts."""
        if rollout.purpose is not Purpose.EXPLORE or rollout.steps == self.path_steps:
            return None
        return self.path_steps

    def keeps_trajectory(self, rollout: Rollout) -> bool:
        """Whether the states around the stochastic steps of this rollout are kept."""
        return self.keeps == "trajectory" and self.coarse_path(rollout) is None

    def describe(self) -> dict[str, str]:
        """Every field as text, to compare recipes across processes."""
        return {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class RolloutState:
    """A rollout between two denoising steps.

    Attributes:
        condition: the prompt's embeddings.
        step: index of the next step; ``rollout.steps`` when done.
        latents: float32, in the family's ``latent_shape``.
        sigmas: [steps + 1] float32 on the CPU; replay uses the same values.
        window: indices of the stochastic steps (contiguous; empty for an ODE).
        kept: latents before the first stochastic step and after each one so far; empty if the recipe keeps x0
            only.
        log_probs: scalars, one per stochastic step so far.
        added: block residuals for reuse; None: run all blocks. Valid only on this rank in its current group;
            never serialized.
    """

    rollout: Rollout
    recipe: Recipe
    condition: Condition
    step: int
    latents: Tensor
    sigmas: Tensor
    window: range
    kept: tuple[Tensor, ...] = ()
    log_probs: tuple[Tensor, ...] = ()
    added: Added | None = None

    @property
    def done(self) -> bool:
        """Whether all steps are taken."""
        return self.step == self.rollout.steps

    @property
    def stochastic(self) -> bool:
        """Whether the next step is stochastic."""
        return self.step in self.window

    def header(self) -> dict[str, object]:
        """All but the tensors, of JSON types."""
        return {
            "format": _FORMAT,
            "rollout": dataclasses.asdict(self.rollout),
            "recipe": self.recipe.describe(),
            "step": self.step,
            "window": [self.window.start, self.window.stop],
            "embeddings": self.condition.checksum,
        }

    def to_tensors(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """(header, tensors copied to the CPU)."""
        tensors = {
            "latents": self.latents,
            "sigmas": self.sigmas,
            "kept": torch.stack(self.kept) if self.kept else self.latents.new_empty(0, *self.latents.shape),
            "log_probs": torch.stack(self.log_probs) if self.log_probs else self.latents.new_empty(0),
        }
        tensors |= {CONDITION + name: tensor for name, tensor in self.condition.tensors.items()}
        return self.header(), {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Header:
    """What :meth:`RolloutState.header` says."""

    rollout: Rollout
    recipe: Mapping[str, object]
    step: int
    window: tuple[int, int]
    embeddings: str | None


_HEADER = TypeAdapter(_Header)


def from_tensors(
    header: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    recipe: Recipe,
    device: torch.device | str = "cpu",
) -> RolloutState:
    """Restore :meth:`RolloutState.to_tensors` on ``device``.

    Raises:
        ValueError: another format, a recipe other than the rollout began with, or inconsistent tensors.
    """
    if header.get("format") != _FORMAT:
        raise ValueError(f"rollout state of format {header.get('format')!r}; expected {_FORMAT}")
    read = _HEADER.validate_python(header)
    for field, value in recipe.describe().items():
        if (began := read.recipe[field]) != value:
            raise ValueError(
                f"rollout state began with {field} {began}, but this worker's recipe has {value}: "
                "resume it under the configuration it began with"
            )
    moved = {name: tensor.to(device) for name, tensor in tensors.items() if name != "sigmas"}
    state = RolloutState(
        rollout=read.rollout,
        recipe=recipe,
        condition=Condition(
            {
                name.removeprefix(CONDITION): tensor
                for name, tensor in moved.items()
                if name.startswith(CONDITION)
            },
            read.embeddings,
        ),
        step=read.step,
        latents=moved["latents"],
        sigmas=tensors["sigmas"].cpu(),
        window=range(*read.window),
        kept=moved["kept"].unbind(0),
        log_probs=moved["log_probs"].unbind(0),
    )
    _check(state)
    return state


@dataclass(frozen=True, slots=True, eq=False)
class SampleTensors:
    """What training needs of a finished rollout with S stochastic steps, float32 on the CPU.

    Attributes:
        final: x0, in the family's ``latent_shape``.
        sigmas: noise levels of ``latents``, [S + 1]; without latents the whole schedule, [T + 1].
        latents: around the stochastic steps, [S + 1, *latent_shape], or around the last step; None if the
            recipe keeps x0 only.
        log_probs: as scored while rolling out, [S]; None without ``latents``, or of the last step.
        gradient: of the reward by ``final``, if it was asked for.
    """

    final: Tensor
    sigmas: Tensor
    latents: Tensor | None = None
    log_probs: Tensor | None = None
    gradient: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """Those that are not None."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRollout:
    """A decoded rollout.

    Attributes:
        image: [height, width, 3] uint8; of a video [frames, height, width, 3].
    """

    rollout: Rollout
    image: NDArray[np.uint8]
    tensors: SampleTensors


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout with non-finite values or another failure: no image, and never trained on."""

    rollout: Rollout
    reason: str


def _check(state: RolloutState) -> None:
    kept = state.recipe.keeps_trajectory(state.rollout)
    taken = len([i for i in state.window if i < state.step]) if kept else 0
    expected = taken + 1 if taken else 0
    if state.recipe.keeps == "query" and state.done:
        expected = 2  # around the last step
    if len(state.kept) != expected or len(state.log_probs) != taken:
        raise ValueError(
            f"state of rollout {state.rollout.id} at step {state.step} holds {len(state.kept)} kept latents "
            f"and {len(state.log_probs)} log-probs; expected {expected} and {taken}"
        )
    if len(state.sigmas) != state.rollout.steps + 1 or not 0 <= state.step <= state.rollout.steps:
        raise ValueError(
            f"state of rollout {state.rollout.id}: step {state.step} with {len(state.sigmas)} noise levels; "
            f"expected a step of {state.rollout.steps} and {state.rollout.steps + 1} levels"
        )
