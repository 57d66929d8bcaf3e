"""The denoising engine of one GPU: states in, states out.

    states = engine.start(rollouts, conditions, recipe)
    while not all(state.done for state in states):
        with slots.use("policy") as model:
            states = engine.step(model, states)
    results = engine.finish(states)

The caller owns the states: between steps it may add, remove or commit some, or resume them on another engine.
A step batches states of different prompts, seeds, step indices and step counts if size and guidance agree.
Batch composition changes results only by kernel rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

from spotlight.diffusion import samplers
from spotlight.diffusion.brownian import Kick, coarse_kicks, coarse_window, kick_batch
from spotlight.diffusion.noise import INITIAL, noise_batch
from spotlight.models.condition import Condition, Guidance, Passes, in_turn
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import Compute, ForwardLog
from spotlight.rollout import step_cache
from spotlight.rollout.state import Added, FailedRollout, FinishedRollout, Recipe, RolloutState, SampleTensors
from spotlight.scheduler.types import Purpose, Rollout
from spotlight_kernels.measure.peak_rates import peak_of

Key = TypeVar("Key")


class Blocks(StrEnum):
    """How a step runs the transformer blocks."""

    RUN = "run"
    RECORD = "record"
    REUSE = "reuse"


class Engine:
    """Denoises rollouts with the module the caller passes.

    Args:
        max_batch: rollouts per forward; large images are decoded fewer at a time.
        negative: embeddings of the negative prompt; required with guidance.
        autocast: dtype of the DiT's matrix products; None: off. Must equal the learner's, or replay would
            differ. Preview recipes may override it.

    Attributes:
        forwards: of the transformer, for throughput.
    """

    def __init__(
        self,
        family: ModelFamily,
        *,
        max_batch: int,
        negative: Condition | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"engine's max_batch is {max_batch}; expected at least 1")
        self._family = family
        self.max_batch = max_batch
        self.forwards = ForwardLog()
        self._paths: dict[tuple[MediaSize, int, int], tuple[Kick, ...]] = {}
        self.autocast = autocast
        self._negative = None if negative is None else negative.to(family.device)

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        return self._family.device

    @property
    def peak_flop_s(self) -> float | None:
        """Most operations a second of this device in the dtype of its products; None: unknown."""
        return peak_of(self.device, self.autocast or self._family.dtype)

    def take_work(self) -> Compute:
        """What the forwards since the last call took; operations are not counted on CPUs."""
        return self.forwards.take(self._family, operations=self.device.type != "cpu")

    def start(
        self, rollouts: Sequence[Rollout], conditions: Sequence[Condition], recipe: Recipe
    ) -> list[RolloutState]:
        """States at step 0: noise drawn from each rollout's seed.

        Raises:
            ModelError: the family does not support the size.
            ValueError: the SDE window does not fit the steps; no steps; a preview with more steps than its
                rollouts; guidance without a negative prompt; preview shortcuts for another purpose; or not
                one condition per rollout.
        """
        self._family.check_size(recipe.size)
        if recipe.guidance_scale > 1 and self._negative is None:
            raise ValueError(
                f"guidance scale is {recipe.guidance_scale}, but the engine has no negative prompt: "
                "give the embeddings of one (of ' ' if nothing is to be avoided), or scale 1"
            )
        shape = self._family.latent_shape(recipe.size)
        seeds = [recipe.initial_seed(rollout) for rollout in rollouts]
        noise = noise_batch(seeds, [INITIAL] * len(rollouts), shape, self._family.device)
        moved = {each: each.to(self._family.device) for each in dict.fromkeys(conditions)}
        schedules = {rollout.steps: self._sigmas(rollout, recipe) for rollout in rollouts}
        for rollout in rollouts:
            _require_suited(recipe, rollout)
        return [
            RolloutState(
                rollout=rollout,
                recipe=recipe,
                condition=moved[condition],
                step=0,
                latents=latents,
                sigmas=schedules[rollout.steps],
                window=self._window(recipe, rollout, schedules[rollout.steps]),
            )
            for rollout, condition, latents in zip(rollouts, conditions, noise, strict=True)
        ]

    @torch.no_grad()
    def step(
        self,
        model: nn.Module,
        states: Sequence[RolloutState],
        at_once: int | None = None,
        passes: Passes = in_turn,
    ) -> list[RolloutState]:
        """Advance every unfinished state by one denoising step; order is preserved.

        Args:
            model: the module of the weight slot to use.
            at_once: most rollouts per forward, if that is less than ``max_batch``.
            passes: how the two forwards of guidance are made.
        """
        advanced = list(states)
        most = self.max_batch if at_once is None else min(self.max_batch, at_once)
        for batch in self._batches(advanced, most):
            for index, state in zip(
                batch, self._step_batch(model, [advanced[i] for i in batch], passes), strict=True
            ):
                advanced[index] = state
        return advanced

    @torch.no_grad()
    def finish(self, states: Sequence[RolloutState]) -> list[FinishedRollout | FailedRollout]:
        """Decode finished states; order is preserved.

        Raises:
            ValueError: a state is not done.
        """
        running = [state for state in states if not state.done]
        if running:
            raise ValueError(
                f"rollout {running[0].rollout.id} is at step {running[0].step} of "
                f"{running[0].rollout.steps}: finish takes states whose steps are all taken"
            )
        results: list[FinishedRollout | FailedRollout | None] = [_failure(state) for state in states]
        sound = [i for i, result in enumerate(results) if result is None]
        for size, members in _grouped((states[i].recipe.size, i) for i in sound):
            for batch in _chunks(members, size.decoded_together(self.max_batch)):
                decoded = self._family.decode(torch.stack([states[i].latents for i in batch]), size)
                for i, frames in zip(batch, decoded, strict=True):
                    image = frames[0] if size.frames == 1 else frames
                    results[i] = FinishedRollout(states[i].rollout, image.copy(), _sample_tensors(states[i]))
        return [result for result in results if result is not None]

    def take_fewer(self, than: int | None = None) -> None:
        """Halve ``max_batch`` after an out-of-memory error, or halve ``than`` if fewer were tried."""
        tried = self.max_batch if than is None else min(self.max_batch, than)
        self.max_batch = max(1, tried // 2)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, model: nn.Module, states: Sequence[RolloutState]) -> list[FinishedRollout | FailedRollout]:
        """Step until all are done, then finish."""
        current = list(states)
        while not all(state.done for state in current):
            current = self.step(model, current)
        return self.finish(current)

    def _batches(self, states: Sequence[RolloutState], most: int) -> Iterator[list[int]]:
        """Sorted by text length to limit padding."""
        running = ((_forward_key(state), i) for i, state in enumerate(states) if not state.done)
        for _, members in _grouped(running):
            members.sort(key=lambda i: states[i].condition.tokens)
            yield from _chunks(members, most)

    def _step_batch(self, model: nn.Module, states: list[RolloutState], passes: Passes) -> list[RolloutState]:
        latents = torch.stack([state.latents for state in states])
        sigma, sigma_next = _levels(states).to(self._family.device)
        velocity, added = self._velocity(model, latents, sigma, states, passes)
        advanced = list(states)
        groups = _grouped((state.recipe.sampler, i) for i, state in enumerate(states))
        for sampler, members_at in groups:
            members = [states[i] for i in members_at]
            rows = members_at if len(groups) > 1 else slice(None)  # a view, not a copy, if all go together
            stepped = samplers.step(
                sampler,
                latents[rows],
                velocity[rows],
                sigma[rows],
                sigma_next[rows],
                noise=self._kicks(members, latents),
                stochastic=[state.stochastic for state in members],
            )
            new = zip(members_at, stepped.latents.unbind(0), stepped.log_prob.unbind(0), strict=True)
            for i, row, log_prob in new:
                advanced[i] = _advance(states[i], row, log_prob, added[i])
        return advanced

    def _velocity(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        states: Sequence[RolloutState],
        passes: Passes,
    ) -> tuple[Tensor, Sequence[Added | None]]:
        """Velocities shaped like ``latents``, and the block residuals to keep per state."""
        recipe, device = states[0].recipe, self._family.device
        condition = self._family.collate([state.condition for state in states])
        guidance = self._guidance(recipe, [state.condition for state in states], passes)
        autocast = self.autocast if recipe.autocast is None else recipe.autocast
        added: Sequence[Added | None] = [state.added for state in states]
        with ExitStack() as contexts:
            contexts.enter_context(torch.autocast(device.type, dtype=autocast, enabled=autocast is not None))
            match _blocks(states[0]):
                case Blocks.RECORD:
                    added = contexts.enter_context(step_cache.recording(model))
                case Blocks.REUSE:
                    contexts.enter_context(step_cache.reusing(model, [row for row in added if row]))
            velocity = self._family.velocity(
                model, latents, sigma, condition, guidance, recipe.size, self.forwards
            )
        return velocity, added

    def _window(self, recipe: Recipe, rollout: Rollout, sigmas: Tensor) -> range:
        if recipe.window is None:
            return range(0)
        path_steps = recipe.coarse_path(rollout)
        if path_steps is None:
            return recipe.window.steps(rollout.steps, rollout.seed, rollout.iteration)
        window = recipe.window.steps(path_steps, rollout.seed, rollout.iteration)
        return coarse_window(window, self._family.sigmas(path_steps, recipe.size).tolist(), sigmas.tolist())

    def _kicks(self, states: Sequence[RolloutState], latents: Tensor) -> Tensor | None:
        """Noise shaped like ``latents``; zero in deterministic rows."""
        rows = [i for i, state in enumerate(states) if state.stochastic]
        if not rows:
            return None
        shape, device = latents.shape[1:], latents.device
        coarse = [i for i in rows if states[i].recipe.coarse_path(states[i].rollout) is not None]
        own = [i for i in rows if i not in set(coarse)] if coarse else rows
        if len(own) == len(states):
            return _own_kicks(states, shape, device)
        noise = latents.new_zeros(len(states), *shape, dtype=torch.float32)
        if own:
            noise[torch.tensor(own, device=device)] = _own_kicks([states[i] for i in own], shape, device)
        if coarse:
            kicks = [self._path(states[i])[states[i].step] for i in coarse]
            seeds = [states[i].rollout.seed for i in coarse]
            noise[torch.tensor(coarse, device=device)] = kick_batch(seeds, kicks, shape, device)
        return noise

    def _path(self, state: RolloutState) -> tuple[Kick, ...]:
        """Kicks of a preview, from the noise of the rollout it stands for."""
        recipe, steps = state.recipe, state.rollout.steps
        path_steps = recipe.coarse_path(state.rollout)
        assert path_steps is not None, "asked for a preview's steps only"
        key = recipe.size, path_steps, steps
        if key not in self._paths:
            fine = self._family.sigmas(path_steps, recipe.size).tolist()
            self._paths[key] = coarse_kicks(fine, state.sigmas.tolist())
        return self._paths[key]

    def _guidance(self, recipe: Recipe, conditions: Sequence[Condition], passes: Passes) -> Guidance:
        if recipe.guidance_scale <= 1 or self._negative is None:
            return Guidance(embedded=recipe.embedded_guidance)
        negative = self._family.negatives(conditions, self._negative)
        return Guidance(recipe.guidance_scale, negative, recipe.embedded_guidance, passes)

    def _sigmas(self, rollout: Rollout, recipe: Recipe) -> Tensor:
        if rollout.steps < 1:
            raise ValueError(f"rollout {rollout.id} has {rollout.steps} denoising steps; expected at least 1")
        if recipe.schedule_steps is None:
            return self._family.sigmas(rollout.steps, recipe.size)
        levels = self._family.sigmas(recipe.schedule_steps, recipe.size)[: rollout.steps]
        return torch.cat([levels, levels.new_zeros(1)])


def _require_suited(recipe: Recipe, rollout: Rollout) -> None:
    if recipe.path_steps is not None and rollout.steps > recipe.path_steps:
        raise ValueError(
            f"preview {rollout.id} has {rollout.steps} denoising steps, the rollouts it chooses seeds for "
            f"{recipe.path_steps}; expected at most as many"
        )
    if recipe.approximate and rollout.purpose is not Purpose.EXPLORE:
        raise ValueError(
            f"rollout {rollout.id} is to {rollout.purpose} with step_cache {recipe.step_cache} and autocast "
            f"{recipe.autocast}: such shortcuts are for previews; expected 1 and None"
        )


def _levels(states: Sequence[RolloutState]) -> Tensor:
    """Noise levels around each state's next step, [2, states] on the CPU."""
    # Rollouts that started together share their schedule and step: read each pair once.
    pairs: dict[tuple[int, int], Tensor] = {}
    keys = [(id(state.sigmas), state.step) for state in states]
    for key, state in zip(keys, states, strict=True):
        if key not in pairs:
            pairs[key] = state.sigmas[state.step : state.step + 2]
    return torch.stack([pairs[key] for key in keys], dim=1)


def _own_kicks(states: Sequence[RolloutState], shape: torch.Size, device: torch.device) -> Tensor:
    seeds, steps = [state.rollout.seed for state in states], [state.step for state in states]
    return noise_batch(seeds, steps, shape, device)


def _blocks(state: RolloutState) -> Blocks:
    """Depends on the step index alone, unless there is nothing to reuse."""
    every, following = state.recipe.step_cache, state.step + 1
    if state.step % every and state.added is not None:
        return Blocks.REUSE
    return Blocks.RECORD if following % every and following < state.rollout.steps else Blocks.RUN


def _advance(state: RolloutState, latents: Tensor, log_prob: Tensor, added: Added | None) -> RolloutState:
    following = state.step + 1
    if following == state.rollout.steps or following % state.recipe.step_cache == 0:
        added = None
    kept, log_probs = state.kept, state.log_probs
    if state.recipe.keeps == "query" and following == state.rollout.steps:
        kept = (state.latents, latents)
    if state.stochastic and state.recipe.keeps_trajectory(state.rollout):
        kept = (*(kept or (state.latents,)), latents)
        log_probs = (*log_probs, log_prob)
    return dataclasses.replace(
        state, step=following, latents=latents, kept=kept, log_probs=log_probs, added=added
    )


def _sample_tensors(state: RolloutState) -> SampleTensors:
    final = state.latents.to("cpu", copy=True)
    if state.recipe.keeps == "query":
        return SampleTensors(final, state.sigmas[-2:].clone(), torch.stack(state.kept).cpu())
    if not state.recipe.keeps_trajectory(state.rollout):
        return SampleTensors(final, state.sigmas)
    return SampleTensors(
        final,
        sigmas=state.sigmas[state.window.start : state.window.stop + 1].clone(),
        latents=torch.stack(state.kept).cpu(),
        log_probs=torch.stack(state.log_probs).cpu(),
    )


def _failure(state: RolloutState) -> FailedRollout | None:
    if not bool(torch.isfinite(state.latents).all()):
        return FailedRollout(state.rollout, "the final latents are not finite: the model has diverged")
    if state.log_probs and not bool(torch.isfinite(torch.stack(state.log_probs)).all()):
        return FailedRollout(state.rollout, "a step's log-prob is not finite")
    return None


def _forward_key(state: RolloutState) -> tuple[Hashable, ...]:
    # Shortcuts never share a forward with full computation, whose rounding they would change.
    recipe = state.recipe
    guidance = recipe.guidance_scale, recipe.embedded_guidance
    return (recipe.size, *guidance, recipe.autocast, recipe.step_cache, _blocks(state))


def _grouped(items: Iterable[tuple[Key, int]]) -> list[tuple[Key, list[int]]]:
    groups: dict[Key, list[int]] = {}
    for key, index in items:
        groups.setdefault(key, []).append(index)
    return list(groups.items())


def _chunks(indices: Sequence[int], size: int) -> Iterator[list[int]]:
    """Nearly equal chunks: 17 with at most 16 each gives 9 + 8, not 16 + 1."""
    count = -(-len(indices) // size)
    for k in range(count):
        yield list(indices[k * len(indices) // count : (k + 1) * len(indices) // count])
