"""Previews that reuse blocks or compute in bfloat16: each by itself, and no trace of it in other rollouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spotlight.diffusion.samplers import ODE, FlowSDE
from spotlight.diffusion.schedule import AllSteps, RandomWindow
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState, from_tensors
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId

TOLERANCE = 2e-5
"""Largest difference of latents (standard deviation about 1) that batch mates may make."""

STEPS = 7
SIZE = MediaSize(16, 16)
PROMPTS = ("one red circle", "two blue squares", "two blue squares left of one yellow triangle")
TRAIN = Recipe(SIZE, FlowSDE(0.7), RandomWindow(2), 1.0, "trajectory")
GUIDED = dataclasses.replace(TRAIN, guidance_scale=3.0)
NFT = Recipe(SIZE, FlowSDE(0.7), AllSteps(), 1.0, "final")
EVAL = Recipe(SIZE, ODE(), None, 1.0, "final")
EVERY_SECOND = NFT.preview(STEPS, step_cache=2)
FIRST = ("every second", "both")
"""Of the recipes below, in the first tier; "both" has what the others have."""
RECIPES = {
    "every second": EVERY_SECOND,
    "every third": EVAL.preview(STEPS, step_cache=3),
    "guided": GUIDED.preview(STEPS, step_cache=2),
    "bfloat16": NFT.preview(STEPS, autocast=torch.bfloat16),
    "both": GUIDED.preview(STEPS, step_cache=3, autocast=torch.bfloat16),
}


@pytest.fixture(scope="module")
def family(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> QwenImage:
    return QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path_factory.mktemp("embeds")
    )


def engine(family: QwenImage, max_batch: int = 16) -> Engine:
    return Engine(family, max_batch=max_batch, negative=family.encode([" "])[0])


def start(
    family: QwenImage, seeds: list[int], recipe: Recipe, purpose: Purpose = Purpose.EXPLORE
) -> list[RolloutState]:
    rollouts = [
        Rollout(
            RolloutId(f"{purpose}{seed}"), purpose, 3, PromptId(f"p{seed % 3}"), seed, seed, STEPS,
            PolicyVersion(2),
        )
        for seed in seeds
    ]  # fmt: skip
    conditions = family.encode([PROMPTS[seed % 3] for seed in seeds])
    return engine(family).start(rollouts, conditions, recipe)


def run(family: QwenImage, states: list[RolloutState], max_batch: int = 16) -> list[FinishedRollout]:
    results = engine(family, max_batch).run(family.transformer, states)
    assert all(isinstance(result, FinishedRollout) for result in results)
    return [result for result in results if isinstance(result, FinishedRollout)]


def finals(results: list[FinishedRollout]) -> Tensor:
    return torch.stack([result.tensors.final for result in results])


def same_bits(one: FinishedRollout, other: FinishedRollout) -> bool:
    if not torch.equal(one.tensors.final, other.tensors.final) or (one.image != other.image).any():
        return False
    a, b = one.tensors, other.tensors
    if a.latents is None or b.latents is None or a.log_probs is None or b.log_probs is None:
        return a.latents is b.latents
    return torch.equal(a.latents, b.latents) and torch.equal(a.log_probs, b.log_probs)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(
            recipe,
            name,
            id=f"{kind}-{name}",
            marks=() if (kind, name) in (("train", "every second"), ("guided", "both")) else pytest.mark.slow,
        )
        for kind, recipe in (("train", TRAIN), ("guided", GUIDED))
        for name in RECIPES
    ],
)
def test_previews_leave_no_trace_in_rollouts(family: QwenImage, recipe: Recipe, name: str) -> None:
    """Equal bits, with previews before them, in the same steps, and after them."""
    seeds = [0, 1, 2, 3]
    rollouts = start(family, seeds, recipe, Purpose.TRAIN)
    judged = start(family, seeds, EVAL, Purpose.EVAL)
    # Rollouts of both kinds share forwards where guidance agrees: the same company, with previews or without.
    expected = run(family, [*rollouts, *judged])
    run(family, start(family, [5, 6], RECIPES[name]))
    assert all(map(same_bits, run(family, [*rollouts, *judged]), expected))
    among = [*start(family, [7, 8], RECIPES[name]), *rollouts, *start(family, [9], RECIPES[name]), *judged]
    found = run(family, among)
    assert all(map(same_bits, [*found[2:6], *found[7:]], expected))


@pytest.mark.parametrize("recipe", [TRAIN, GUIDED, NFT], ids=["SDE window", "guided", "every step SDE"])
def test_a_preview_of_all_steps_by_current_weights_is_the_rollout(family: QwenImage, recipe: Recipe) -> None:
    """Equal bits. Who would keep it instead of making it again trains on a subset of larger groups."""
    seeds = [0, 1, 2, 3]
    previews = run(family, start(family, seeds, recipe.preview(STEPS)))
    rollouts = run(family, start(family, seeds, recipe, Purpose.TRAIN))
    for preview, rollout in zip(previews, rollouts, strict=True):
        assert torch.equal(preview.tensors.final, rollout.tensors.final)
        assert (preview.image == rollout.image).all()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_preview_does_not_depend_on_company(family: QwenImage, name: str) -> None:
    recipe, seeds = RECIPES[name], list(range(6))
    # In half precision the rounding of kernels is that of 8 bits.
    tolerance = TOLERANCE if recipe.autocast is None else 0.05
    together = finals(run(family, start(family, seeds, recipe)))
    for seed in (0, 5):
        alone = finals(run(family, start(family, [seed], recipe)))[0]
        assert (alone - together[seed]).abs().max() <= tolerance
    chunked = finals(run(family, start(family, seeds[::-1], recipe), max_batch=4)).flip(0)
    assert (chunked - together).abs().max() <= tolerance


@settings(max_examples=settings.default.max_examples // 6)
@given(joins=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_previews_that_join_at_any_step_are_the_same(family: QwenImage, joins: list[int]) -> None:
    expected = finals(run(family, start(family, [0, 1, 2, 3], EVERY_SECOND)))
    waiting = list(zip(joins, start(family, [0, 1, 2, 3], EVERY_SECOND), strict=True))
    mover, clock, states = engine(family), 0, list[RolloutState]()
    while len(states) < 4 or not all(state.done for state in states):
        states += [state for join, state in waiting if join == clock]
        states = mover.step(family.transformer, states)
        clock += 1
    for state in states:
        assert (state.latents - expected[state.rollout.seed]).abs().max() <= TOLERANCE


@contextmanager
def reuse_by_hand(transformer: nn.Module, passes: int, every: int) -> Iterator[None]:
    """The same with PyTorch's hooks on a forward that runs all blocks: one rollout, ``passes`` a step."""
    kept: dict[int, Tensor] = {}
    first: list[Tensor] = []
    calls = 0

    def after_first(module: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> None:
        first[:] = [output[1]]

    def after_last(
        module: nn.Module, args: object, output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        nonlocal calls
        step, which = divmod(calls, passes)
        calls += 1
        if step % every == 0:
            kept[which] = output[1] - first[0]
            return None
        return output[0], first[0] + kept[which]

    blocks = transformer.transformer_blocks
    assert isinstance(blocks, nn.ModuleList)
    handles = [
        blocks[0].register_forward_hook(after_first),
        blocks[-1].register_forward_hook(after_last),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["every second", "every third", "guided"])
def test_blocks_are_reused_as_by_hand(family: QwenImage, name: str) -> None:
    """Of the step before, of the same rollout and of the same pass of guidance; and it makes a difference."""
    recipe = RECIPES[name]
    (found,) = finals(run(family, start(family, [4], recipe)))
    whole = dataclasses.replace(recipe, step_cache=1)
    (plain,) = finals(run(family, start(family, [4], whole)))
    with reuse_by_hand(family.transformer, 2 if recipe.guidance_scale > 1 else 1, recipe.step_cache):
        (expected,) = finals(run(family, start(family, [4], whole)))
    assert (found - expected).abs().max() <= TOLERANCE
    assert (found - plain).abs().max() > 0.01


def test_blocks_run_at_every_nth_step(family: QwenImage) -> None:
    ran: list[int] = []
    handles = [
        block.attn.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
        for i, block in enumerate(family.transformer.transformer_blocks)  # type: ignore[arg-type]
    ]
    run(family, start(family, [0, 1], EVERY_SECOND))
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 0] * 3 + [0, 1]


def test_a_moved_preview_runs_all_blocks_once_more(family: QwenImage) -> None:
    """What blocks added stays behind; where the next step would run all anyhow, nothing changes."""
    mover = engine(family)
    states = start(family, [0], EVERY_SECOND)
    expected = finals(run(family, states))[0]
    for step in range(STEPS):
        header, tensors = states[0].to_tensors()
        assert set(tensors) == {"condition.embeds", "latents", "sigmas", "kept", "log_probs"}
        moved = from_tensors(json.loads(json.dumps(header)), tensors, EVERY_SECOND)
        assert moved.added is None
        (found,) = finals(run(family, [moved]))
        assert torch.equal(found, expected) == (step % 2 == 0)
        states = mover.step(family.transformer, states)
    assert states[0].added is None, "nothing is kept that no step will reuse"


def test_half_precision_is_that_of_the_matrix_products_alone(family: QwenImage) -> None:
    seen: list[torch.dtype] = []
    handle = family.transformer.img_in.register_forward_hook(  # type: ignore[operator, union-attr]
        lambda module, args, output: seen.append(output.dtype)
    )
    states = [
        *start(family, [0], RECIPES["bfloat16"]),
        *start(family, [0], NFT.preview(STEPS)),
    ]
    half, whole = run(family, states)
    handle.remove()
    assert seen == [torch.bfloat16, torch.float32] * STEPS
    assert half.tensors.final.dtype == torch.float32
    assert 1e-3 < (half.tensors.final - whole.tensors.final).abs().max() < 0.5


def test_shortcuts_are_for_previews_only(family: QwenImage) -> None:
    for recipe in (EVERY_SECOND, RECIPES["bfloat16"]):
        for purpose in (Purpose.TRAIN, Purpose.EVAL):
            with pytest.raises(ValueError, match="such shortcuts are for previews"):
                start(family, [0], recipe, purpose)
    for shortcut in ({"step_cache": 2}, {"autocast": torch.bfloat16}, {"step_cache": 0}):
        with pytest.raises(ValueError, match="neither where a trajectory is kept"):
            dataclasses.replace(TRAIN, **shortcut)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="began with step_cache 2, but this worker's recipe has 1"):
        from_tensors(*start(family, [0], EVERY_SECOND)[0].to_tensors(), NFT.preview(STEPS))
