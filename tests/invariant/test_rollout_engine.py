"""A rollout is fixed by its prompt and seed: company, order, pauses and moves leave no trace in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.diffusion import samplers
from spotlight.diffusion.brownian import coarse_kicks, kick_batch
from spotlight.diffusion.noise import INITIAL, noise_batch
from spotlight.diffusion.samplers import CPS, ODE, Dance, FlowSDE, Sampler
from spotlight.diffusion.schedule import AllSteps, RandomWindow, SlidingWindow
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FailedRollout, FinishedRollout, Recipe, RolloutState, from_tensors
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.prompts import PromptId

TOLERANCE = 2e-5
"""Largest difference of latents (standard deviation about 1) that batch mates may make."""

LOG_PROB_TOLERANCE = 1e-6
"""The same of log-probs (about -1): a tenth of the smallest clip range in use with them, 1e-5."""

STEPS = 5
SIZE = MediaSize(16, 16)
PROMPTS = ("one red circle", "two blue squares", "two blue squares left of one yellow triangle")
TRAIN = Recipe(SIZE, FlowSDE(0.7), RandomWindow(2), 1.0, "trajectory")
GUIDED = dataclasses.replace(TRAIN, sampler=CPS(0.8), guidance_scale=3.0)
NFT = Recipe(SIZE, FlowSDE(0.7), AllSteps(), 1.0, "final")
EVAL = Recipe(SIZE, ODE(), None, 1.0, "final")


@pytest.fixture(scope="module")
def family(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> QwenImage:
    return QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path_factory.mktemp("embeds")
    )


def rollout(seed: int, steps: int = STEPS) -> Rollout:
    return Rollout(
        RolloutId(f"r{seed}"), Purpose.TRAIN, 3, PromptId(f"p{seed % 3}"), seed, seed, steps, PolicyVersion(2)
    )


def engine(family: QwenImage, max_batch: int = 16) -> Engine:
    return Engine(family, max_batch=max_batch, negative=family.encode([" "])[0])


def start(
    family: QwenImage, seeds: list[int], recipe: Recipe = TRAIN, max_batch: int = 16
) -> list[RolloutState]:
    conditions = family.encode([PROMPTS[seed % 3] for seed in seeds])
    return engine(family, max_batch).start([rollout(seed) for seed in seeds], conditions, recipe)


def finished(results: list[FinishedRollout | FailedRollout]) -> list[FinishedRollout]:
    assert all(isinstance(result, FinishedRollout) for result in results)
    return [result for result in results if isinstance(result, FinishedRollout)]


def run(
    family: QwenImage, seeds: list[int], recipe: Recipe = TRAIN, max_batch: int = 16
) -> list[FinishedRollout]:
    states = start(family, seeds, recipe, max_batch)
    return finished(engine(family, max_batch).run(family.transformer, states))


def assert_same(
    one: FinishedRollout, two: FinishedRollout, tolerance: float = 0.0, *, decoded_alike: bool = True
) -> None:
    """``decoded_alike``: in batches of one size; where not, the VAE's rounding may move a level by one."""
    assert one.rollout == two.rollout
    assert (one.tensors.final - two.tensors.final).abs().max() <= tolerance
    assert np.abs(one.image.astype(int) - two.image).max() <= (1 if tolerance or not decoded_alike else 0)
    a, b = one.tensors, two.tensors
    assert torch.equal(a.sigmas, b.sigmas)
    assert (a.latents is None) == (b.latents is None)
    if (
        a.latents is not None
        and b.latents is not None
        and a.log_probs is not None
        and b.log_probs is not None
    ):
        assert (a.latents - b.latents).abs().max() <= tolerance
        difference = (a.log_probs - b.log_probs).abs().max()
        assert difference <= (LOG_PROB_TOLERANCE if tolerance else 0)


@pytest.mark.parametrize("recipe", [TRAIN, GUIDED, EVAL], ids=["train", "guided", "eval"])
def test_a_batch_of_sixteen_gives_what_one_alone_gives(family: QwenImage, recipe: Recipe) -> None:
    together = run(family, list(range(16)), recipe)
    for seed in (0, 5, 13):
        assert_same(run(family, [seed], recipe)[0], together[seed], TOLERANCE)
    assert (
        together[0].tensors.final - together[3].tensors.final
    ).abs().max() > 0.1  # same prompt, other seed


def test_a_group_may_share_its_initial_noise_and_differs_by_kicks(family: QwenImage) -> None:
    shared = dataclasses.replace(TRAIN, window=AllSteps(), group_noise=11)
    seeds = [0, 1, 3, 6]  # 0, 3 and 6 are of one prompt
    conditions = family.encode([PROMPTS[0]])
    first = start(family, seeds)[0].rollout

    def noise_of(group: str, member: int, group_noise: int = 11) -> torch.Tensor:
        rollout = dataclasses.replace(first, id=RolloutId(f"{group}-{member:03d}"), seed=member)
        recipe = dataclasses.replace(shared, group_noise=group_noise)
        return engine(family).start([rollout], conditions, recipe)[0].latents

    assert torch.equal(noise_of("t000003-000", 0), noise_of("t000003-000", 6))
    assert not torch.equal(noise_of("t000003-000", 0), noise_of("t000003-001", 0)), "the prompt, drawn twice"
    assert not torch.equal(noise_of("t000003-000", 0), noise_of("t000004-000", 0))
    assert not torch.equal(noise_of("t000003-000", 0), noise_of("t000003-000", 0, 12))
    one, _, two, _ = run(family, seeds, shared)
    assert (one.tensors.final - two.tensors.final).abs().max() > 0.1
    with pytest.raises(ValueError, match="would be equal"):
        dataclasses.replace(EVAL, group_noise=11)


def test_rollouts_at_different_steps_share_a_forward(family: QwenImage) -> None:
    calls: list[int] = []
    hook = family.transformer.register_forward_hook(
        lambda module, args, kwargs, out: calls.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    mover = engine(family)
    states: list[RolloutState] = []
    results: dict[str, FinishedRollout] = {}
    waiting = start(family, list(range(6)))
    while waiting or states:
        states = [*states, *waiting[:1]]  # one more joins before every step
        waiting = waiting[1:]
        before, joined = len(calls), len(states)
        states = mover.step(family.transformer, states)
        assert calls[before:] == [joined]
        for result in finished(mover.finish([state for state in states if state.done])):
            results[result.rollout.id] = result
        states = [state for state in states if not state.done]
    hook.remove()
    for seed in range(6):
        assert_same(run(family, [seed])[0], results[f"r{seed}"], TOLERANCE)


def test_order_and_chunks_do_not_matter(family: QwenImage) -> None:
    seeds = list(range(7))
    expected = run(family, seeds)
    for shuffled, max_batch in ((seeds[::-1], 16), ([3, 0, 6, 2, 5, 1, 4], 3), (seeds, 1)):
        results = run(family, shuffled, TRAIN, max_batch)
        assert [result.rollout.seed for result in results] == shuffled
        for result in results:
            assert_same(result, expected[result.rollout.seed], TOLERANCE)


def test_recipes_of_one_size_share_forwards_whatever_their_samplers(family: QwenImage) -> None:
    states = [*start(family, [0, 1], TRAIN), *start(family, [2, 3], EVAL), *start(family, [4], NFT)]
    batches: list[int] = []
    hook = family.transformer.register_forward_hook(
        lambda module, args, kwargs, out: batches.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    results = finished(engine(family).run(family.transformer, states))
    hook.remove()
    assert batches == [5] * STEPS
    for seeds, recipe in (([0, 1], TRAIN), ([2, 3], EVAL), ([4], NFT)):
        for seed in seeds:
            assert_same(run(family, [seed], recipe)[0], results[seed], TOLERANCE)


def test_sizes_and_guidance_are_kept_apart(family: QwenImage) -> None:
    wide = dataclasses.replace(EVAL, size=MediaSize(16, 32))
    guided = dataclasses.replace(EVAL, guidance_scale=2.0)
    recipes = (EVAL, wide, guided)
    mixed = [start(family, [seed], recipe)[0] for seed, recipe in enumerate(recipes)]
    results = finished(engine(family).run(family.transformer, mixed))
    for seed, recipe in enumerate(recipes):
        # Pictures of one size are decoded together, whatever their guidance.
        assert_same(run(family, [seed], recipe)[0], results[seed], decoded_alike=recipe is wide)
        assert results[seed].image.shape == (recipe.size.height, recipe.size.width, 3)


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), CPS(0.8), Dance(0.3)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("window", [AllSteps(), RandomWindow(2), SlidingWindow(size=2, every=1)])
def test_a_replay_repeats_the_log_probs(
    family: QwenImage, sampler: Sampler, window: AllSteps | RandomWindow | SlidingWindow
) -> None:
    seeds = list(range(4))
    recipe = Recipe(SIZE, sampler, window, 1.0, "trajectory")
    results = run(family, seeds, recipe)
    condition = family.collate(family.encode([PROMPTS[seed % 3] for seed in seeds]))
    trajectories: list[Any] = [result.tensors for result in results]
    kept = window.kept(STEPS)
    levels = family.sigmas(STEPS, SIZE)
    for seed, trajectory in zip(seeds, trajectories, strict=True):
        steps = window.steps(STEPS, seed, iteration=3)
        assert trajectory.latents.shape == (kept + 1, *family.latent_shape(SIZE))
        assert trajectory.log_probs.shape == (kept,)
        assert torch.equal(trajectory.sigmas, levels[steps.start : steps.stop + 1])
    for k in range(kept):
        x, x_next = (torch.stack([t.latents[k + i] for t in trajectories]) for i in (0, 1))
        sigma, sigma_next = (torch.stack([t.sigmas[k + i] for t in trajectories]) for i in (0, 1))
        with torch.no_grad():
            velocity = family.velocity(family.transformer, x, sigma, condition, None, SIZE)
        moments = sampler.moments(x, velocity, sigma, sigma_next)
        replayed = sampler.log_prob(x_next, moments)
        recorded = torch.stack([t.log_probs[k] for t in trajectories])
        assert (replayed - recorded).abs().max() <= LOG_PROB_TOLERANCE


def test_kicks_are_the_seeds_own(family: QwenImage) -> None:
    """The first stochastic step, redone by hand with the noise of (seed, step)."""
    state = start(family, [5], Recipe(SIZE, FlowSDE(0.7), AllSteps(), 1.0, "trajectory"))[0]
    shape = family.latent_shape(SIZE)
    assert torch.equal(state.latents, noise_batch([5], [INITIAL], shape)[0])
    advanced = engine(family).step(family.transformer, [state])[0]
    with torch.no_grad():
        velocity = family.velocity(
            family.transformer,
            state.latents[None],
            state.sigmas[:1],
            family.collate([state.condition]),
            None,
            SIZE,
        )
    expected = samplers.step(
        FlowSDE(0.7),
        state.latents[None],
        velocity,
        state.sigmas[:1],
        state.sigmas[1:2],
        noise=noise_batch([5], [0], shape),
    )
    assert torch.equal(advanced.latents, expected.latents[0])
    assert torch.equal(advanced.log_probs[0], expected.log_prob[0])


@settings(max_examples=12, deadline=None)
@given(
    pauses=st.sets(st.integers(0, STEPS), min_size=1, max_size=3),
    recipe=st.sampled_from([TRAIN, GUIDED, NFT, EVAL]),
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=3, unique=True),
)
def test_paused_and_moved_rollouts_end_the_same(
    family: QwenImage, pauses: set[int], recipe: Recipe, seeds: list[int]
) -> None:
    """Bitwise, at the same batch shape; by way of bytes and JSON, to a new engine each time."""
    expected = run(family, seeds, recipe)
    states, current = start(family, seeds, recipe), engine(family)
    for step in range(STEPS + 1):
        if step in pauses:
            written = [state.to_tensors() for state in states]
            wire = [(json.dumps(h), safetensors.torch.save(t)) for h, t in written]
            states = [from_tensors(json.loads(h), safetensors.torch.load(t), recipe) for h, t in wire]
            current = engine(family)
        if step < STEPS:
            states = current.step(family.transformer, states)
    for result, whole in zip(finished(current.finish(states)), expected, strict=True):
        assert_same(result, whole)


def test_a_committed_state_is_a_copy(family: QwenImage) -> None:
    state = start(family, [0])[0]
    _, tensors = state.to_tensors()
    for tensor in tensors.values():
        tensor.fill_(7)
    assert not (state.latents == 7).any()
    assert not (state.sigmas == 7).any()
    assert not (state.condition["embeds"] == 7).any()


def test_a_step_leaves_the_old_states_as_they_were(family: QwenImage) -> None:
    states = start(family, [0, 1])
    before = [state.latents.clone() for state in states]
    one = engine(family).step(family.transformer, states)
    two = engine(family).step(family.transformer, states)
    assert all(torch.equal(state.latents, latents) for state, latents in zip(states, before, strict=True))
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(one, two, strict=True))


def test_results_can_be_trained_on(family: QwenImage) -> None:
    """No inference tensors, no graph."""
    result = run(family, [0])[0]
    assert result.tensors.latents is not None
    assert result.tensors.latents.grad_fn is None
    (result.tensors.latents * torch.ones(1, requires_grad=True)).sum().backward()


def test_done_states_stay_and_do_not_run(family: QwenImage) -> None:
    states = start(family, [0])
    mover = engine(family)
    for _ in range(STEPS):
        states = mover.step(family.transformer, states)
    assert states[0].done
    assert mover.step(torch.nn.Identity(), states) == states
    with pytest.raises(ValueError, match=r"rollout r1 is at step 0 of 5: finish takes"):
        mover.finish([*states, *start(family, [1])])
    assert mover.step(family.transformer, []) == []
    assert mover.finish([]) == []


def test_a_rollout_that_diverged_fails_alone(family: QwenImage) -> None:
    states = start(family, [0, 1, 2], EVAL)
    broken = dataclasses.replace(states[1], latents=torch.full_like(states[1].latents, torch.nan))
    results = engine(family).run(family.transformer, [states[0], broken, states[2]])
    assert isinstance(results[1], FailedRollout)
    assert "not finite" in results[1].reason
    assert results[1].rollout == states[1].rollout
    for index in (0, 2):
        (sound,) = finished([results[index]])
        assert_same(sound, run(family, [index], EVAL)[0], TOLERANCE)


def test_what_does_not_fit_is_refused(family: QwenImage) -> None:
    conditions = family.encode(PROMPTS[:1])
    with pytest.raises(ValueError, match="max_batch is 0"):
        Engine(family, max_batch=0)
    with pytest.raises(ValueError, match="no negative prompt"):
        Engine(family, max_batch=1).start([rollout(0)], conditions, GUIDED)
    with pytest.raises(ValueError, match="r0 has 0 denoising steps"):
        engine(family).start([rollout(0, steps=0)], conditions, EVAL)
    with pytest.raises(ValueError, match="do not fit within"):
        engine(family).start([rollout(0, steps=2)], conditions, TRAIN)
    with pytest.raises(ValueError, match="zip"):
        engine(family).start([rollout(0), rollout(1)], conditions, TRAIN)
    with pytest.raises(ModelError, match="height is 18"):
        engine(family).start([rollout(0)], conditions, dataclasses.replace(EVAL, size=MediaSize(18, 16)))
    with pytest.raises(ValueError, match="a stochastic sampler needs a window"):
        Recipe(SIZE, FlowSDE(0.7), None, 1.0, "final")
    with pytest.raises(ValueError, match="the ODE takes none"):
        Recipe(SIZE, ODE(), AllSteps(), 1.0, "final")
    with pytest.raises(ValueError, match="no stochastic steps to keep"):
        Recipe(SIZE, ODE(), None, 1.0, "trajectory")


def test_a_state_is_not_resumed_under_another_recipe_or_with_parts_missing(family: QwenImage) -> None:
    state = engine(family).step(
        family.transformer, start(family, [0], dataclasses.replace(TRAIN, window=AllSteps()))
    )[0]
    header, tensors = state.to_tensors()
    with pytest.raises(ValueError, match=r"began with sampler FlowSDE\(noise_level=0.7\), but .* CPS"):
        from_tensors(header, tensors, dataclasses.replace(state.recipe, sampler=CPS(0.8)))
    with pytest.raises(ValueError, match="state of format 99; expected 7"):
        from_tensors({**header, "format": 99}, tensors, state.recipe)
    with pytest.raises(ValueError, match="at step 1 holds 1 kept latents and 1 log-probs; expected 2 and 1"):
        from_tensors(header, {**tensors, "kept": tensors["kept"][:1]}, state.recipe)
    with pytest.raises(ValueError, match="step 1 with 5 noise levels; expected a step of 5 and 6 levels"):
        from_tensors(header, {**tensors, "sigmas": tensors["sigmas"][1:]}, state.recipe)


# -- previews ----------------------------------------------------------------------------------------------

FULL = 8
"""Steps of the rollouts that previews stand for."""
PREVIEW = NFT.preview(FULL)


def previews(family: QwenImage, steps: list[int], recipe: Recipe = PREVIEW) -> list[RolloutState]:
    made = [
        dataclasses.replace(rollout(seed, count), purpose=Purpose.EXPLORE) for seed, count in enumerate(steps)
    ]
    conditions = family.encode([PROMPTS[seed % 3] for seed in range(len(steps))])
    return engine(family).start(made, conditions, recipe)


@pytest.mark.parametrize("recipe", [TRAIN, NFT, EVAL], ids=["trajectory", "final", "ode"])
def test_a_preview_of_all_steps_is_its_rollout(family: QwenImage, recipe: Recipe) -> None:
    conditions = family.encode([PROMPTS[0]])
    whole = engine(family).start([rollout(0, FULL)], conditions, recipe)
    expected = finished(engine(family).run(family.transformer, whole))[0]
    for_previews = recipe.preview(FULL, keeps=recipe.keeps)
    (state,) = previews(family, [FULL], for_previews)
    halfway = engine(family).step(family.transformer, [state])[0]
    header, tensors = halfway.to_tensors()
    moved = from_tensors(json.loads(json.dumps(header)), tensors, for_previews)
    found = finished(engine(family).run(family.transformer, [moved]))[0]
    assert_same(dataclasses.replace(found, rollout=expected.rollout), expected)


def test_a_shorter_preview_keeps_no_trajectory(family: QwenImage) -> None:
    states = previews(family, [FULL, 5], TRAIN.preview(FULL, keeps="trajectory"))
    whole, shorter = finished(engine(family).run(family.transformer, states))
    assert whole.tensors.log_probs is not None
    assert shorter.tensors.latents is None
    assert shorter.tensors.log_probs is None


def test_a_preview_of_fewer_steps_follows_the_same_path(family: QwenImage) -> None:
    """Step by step with kicks made by hand."""
    state = previews(family, [5])[0]
    fine, coarse = family.sigmas(FULL, SIZE).tolist(), state.sigmas.tolist()
    kicks = coarse_kicks(fine, coarse)
    assert state.window == range(4)
    assert torch.equal(state.latents, noise_batch([0], [INITIAL], state.latents.shape)[0])
    latents = state.latents[None]
    condition = family.collate([state.condition])
    with torch.no_grad():
        for step in range(5):
            sigma, sigma_next = state.sigmas[step : step + 1], state.sigmas[step + 1 : step + 2]
            velocity = family.velocity(family.transformer, latents, sigma, condition, None, SIZE)
            kick = kick_batch([0], [kicks[step]], latents.shape[1:])
            sde = [step < 4]
            latents = samplers.step(
                FlowSDE(0.7), latents, velocity, sigma, sigma_next, noise=kick, stochastic=sde
            ).latents
    found = finished(engine(family).run(family.transformer, [state]))[0]
    assert (found.tensors.final - latents[0]).abs().max() <= TOLERANCE
    assert found.tensors.latents is None


def test_previews_do_not_depend_on_company_or_moves(family: QwenImage) -> None:
    mixed = [*previews(family, [3, 5, FULL]), *start(family, [5], TRAIN)]
    mover = engine(family)
    together = mover.step(family.transformer, mixed)
    moved = []
    for state in together:
        header, tensors = state.to_tensors()
        moved.append(from_tensors(json.loads(json.dumps(header)), tensors, state.recipe))
    results = finished(engine(family).run(family.transformer, moved))
    alone = [previews(family, [3, 5, FULL])[place] for place in range(3)]
    for place, state in enumerate(alone):
        one = finished(engine(family).run(family.transformer, [state]))[0]
        assert_same(one, results[place], TOLERANCE)
    assert_same(run(family, [5])[0], results[3], TOLERANCE)


def test_recipes_of_previews_that_cannot_be_are_refused(family: QwenImage) -> None:
    assert EVAL.preview(FULL).path_steps is None, "an ODE's path is its initial noise"
    with pytest.raises(ValueError, match="expected a stochastic sampler"):
        dataclasses.replace(EVAL, path_steps=FULL)
    with pytest.raises(ValueError, match="at most as many"):
        previews(family, [FULL + 1])
    assert previews(family, [2])[0].window == range(1)
