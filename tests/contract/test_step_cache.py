"""What `rollout/step_cache.py` assumes of diffusers' First Block Cache; if it moves, fix it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, QwenImageTransformer2DModel
from diffusers.hooks import first_block_cache, hooks
from torch import Tensor, nn

from spotlight.rollout import step_cache
from spotlight.rollout.step_cache import StepCacheError, recording, reusing

BATCH, TOKENS = 3, 4


def make(layers: int = 3) -> QwenImageTransformer2DModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return QwenImageTransformer2DModel(
            in_channels=8,
            out_channels=2,
            num_layers=layers,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=8,
            axes_dims_rope=(2, 2, 4),
        ).eval()


@pytest.fixture
def model() -> Iterator[QwenImageTransformer2DModel]:
    with torch.no_grad():
        yield make()


def forward(model: nn.Module, seed: int, text_tokens: int = 5, name: str | None = None) -> Tensor:
    """Velocities [batch, tokens, channels] of inputs drawn from ``seed``, in a named pass or in none."""
    draw = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8, generator=draw),
        "encoder_hidden_states": torch.randn(BATCH, text_tokens, 8, generator=draw),
        "timestep": torch.rand(BATCH, generator=draw),
        "img_shapes": [[(1, 2, 2)]] * BATCH,
        "return_dict": False,
    }
    if name is None:
        return model(**inputs)[0]  # type: ignore[no-any-return]
    with model.cache_context(name):  # type: ignore[operator]
        return model(**inputs)[0]  # type: ignore[no-any-return]


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def test_the_interface_is_where_it_was(model: QwenImageTransformer2DModel) -> None:
    step_cache.require(model)


@pytest.mark.parametrize(
    ("place", "name", "lacks"),
    [
        (first_block_cache, "FBCSharedBlockState", "first_block_cache.FBCSharedBlockState"),
        (first_block_cache, "_FBC_LEADER_BLOCK_HOOK", "first_block_cache._FBC_LEADER_BLOCK_HOOK"),
        (hooks, "StateManager", "hooks.StateManager"),
    ],
)
def test_a_name_that_is_gone_is_named(
    model: QwenImageTransformer2DModel, place: object, name: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(place, name)
    with (
        pytest.raises(StepCacheError, match=rf"lacks diffusers\.hooks\.{lacks}; .*diffusers>=0\.42"),
        recording(model),
    ):
        pass


@pytest.mark.parametrize("field", step_cache._STATE)
def test_a_field_of_the_state_that_is_gone_is_named(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: None for name in step_cache._STATE if name != field}
    lacking = type("FBCSharedBlockState", (), {"__init__": lambda self: vars(self).update(fields)})
    monkeypatch.setattr(first_block_cache, "FBCSharedBlockState", lacking)
    with pytest.raises(StepCacheError, match=rf"lacks FBCSharedBlockState\.{field};"):
        step_cache.require_interface()


def test_recorded_forwards_are_whole_and_reused_ones_run_the_first_block(
    model: QwenImageTransformer2DModel,
) -> None:
    plain = forward(model, 0)
    ran: list[int] = []
    handles = [
        block.attn.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
        for i, block in enumerate(model.transformer_blocks)
    ]
    with recording(model) as added:
        assert torch.equal(forward(model, 0, name="cond"), plain)
    assert ran == [0, 1, 2]
    assert [{name: row.shape for name, row in each.items()} for each in added] == [
        {"cond": (TOKENS, model.inner_dim)}
    ] * BATCH
    ran.clear()
    with reusing(model, added):
        again = forward(model, 0, name="cond")
    assert ran == [0]
    for handle in handles:
        handle.remove()
    assert difference(again, plain) < 1e-5  # of the same inputs, blocks add the same


def test_rows_are_reused_in_the_order_given_whatever_the_text(model: QwenImageTransformer2DModel) -> None:
    """What blocks add is taken by row; lengths of text may differ from those of the recording."""
    with recording(model) as added:
        forward(model, 0, name="cond")
    seen: list[Tensor] = []

    def last(module: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> None:
        seen.append(output[1])

    order = (2, 0, 1)
    handle = model.transformer_blocks[-1].register_forward_hook(last)
    with reusing(model, [added[i] for i in order]):
        forward(model, 1, text_tokens=7, name="cond")
    with_added = seen.pop()
    zero = [{name: torch.zeros_like(row) for name, row in each.items()} for each in added]
    with reusing(model, zero):
        forward(model, 1, text_tokens=7, name="cond")
    without = seen.pop()
    handle.remove()
    for place, i in enumerate(order):
        assert difference(with_added[place] - without[place], added[i]["cond"]) < 1e-5


def test_passes_are_kept_apart_by_name(model: QwenImageTransformer2DModel) -> None:
    with recording(model) as added:
        cond, uncond = forward(model, 0, name="cond"), forward(model, 1, name="uncond")
    with reusing(model, added):
        assert difference(forward(model, 1, name="uncond"), uncond) < 1e-5
        assert difference(forward(model, 0, name="cond"), cond) < 1e-5
        assert difference(forward(model, 0, name="uncond"), cond) > 1e-3
    with recording(model), pytest.raises(ValueError, match="No cache context"):
        forward(model, 0)


def test_nothing_is_left_behind_even_by_a_failure(model: QwenImageTransformer2DModel) -> None:
    plain = forward(model, 0)
    before = [(module, dict(vars(module))) for module in model.modules()]
    with recording(model) as added:
        forward(model, 0, name="cond")
    with pytest.raises(ValueError, match="No cache context"), reusing(model, added):
        forward(model, 1)
    for module, attributes in before:
        assert vars(module).keys() == attributes.keys(), type(module).__name__
    assert not model.is_cache_enabled
    assert torch.equal(forward(model, 0), plain)


def test_a_cache_that_fails_half_way_is_taken_off(
    model: QwenImageTransformer2DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks have a registry of hooks from elsewhere."""
    hooks.HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0])
    before = [(module, set(vars(module))) for module in model.modules()]

    def fails(block: nn.Module, manager: object, **settings: object) -> None:
        raise RuntimeError("no hook")

    monkeypatch.setattr(first_block_cache, "_apply_fbc_block_hook", fails)
    with pytest.raises(RuntimeError, match="no hook"), recording(model):
        pass
    for module, attributes in before:
        assert set(vars(module)) == attributes, type(module).__name__
    assert not model.transformer_blocks[0]._diffusers_hook.hooks
    assert not model.is_cache_enabled


def test_a_sharded_block_is_known_by_its_base(model: QwenImageTransformer2DModel) -> None:
    """FSDP2 gives every block a class of its own, a subclass."""
    plain = forward(model, 0)
    for block in model.transformer_blocks:
        block.__class__ = type("FSDPBlock", (type(block),), {})
    with recording(model) as added:
        assert torch.equal(forward(model, 0, name="cond"), plain)
    with reusing(model, added):
        assert difference(forward(model, 0, name="cond"), plain) < 1e-5


def test_what_cannot_reuse_blocks_says_why(model: QwenImageTransformer2DModel) -> None:
    with pytest.raises(StepCacheError, match="Linear has no caches"):
        step_cache.require(nn.Linear(1, 1))
    with pytest.raises(StepCacheError, match="has 1 transformer blocks, of which the first always runs"):
        step_cache.require(make(layers=1))
    model.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(StepCacheError, match="another cache on"):
        step_cache.require(model)
    model.disable_cache()
    model.transformer_blocks[1] = nn.Identity()
    with pytest.raises(StepCacheError, match="does not know how Identity hands on"):
        step_cache.require(model)
