"""What `rollout/sequence_parallel/ulysses.py` assumes of diffusers' context parallelism; if it moves, fix
it there.

That the attention of diffusers computes right with what is set here, only several ranks can show:
tests/invariant/test_groups.py.
"""

from __future__ import annotations

import dataclasses
import inspect

import diffusers
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models import attention_dispatch
from torch import nn

from spotlight.rollout.sequence_parallel import ulysses as sequence_parallel
from spotlight.rollout.sequence_parallel.plans import PLANS
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel, SequenceParallelError, share_out


@pytest.fixture(scope="module")
def transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        in_channels=8,
        out_channels=2,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


def test_the_interface_is_where_it_was() -> None:
    sequence_parallel.require_interface()


@pytest.mark.parametrize("name", ["_ulysses_mesh", "_world_size"])
def test_a_field_that_is_gone_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [f for f in dataclasses.fields(sequence_parallel.ContextParallelConfig) if f.name != name]
    moved = dataclasses.make_dataclass("ContextParallelConfig", [(f.name, object, None) for f in fields])
    monkeypatch.setattr(sequence_parallel, "ContextParallelConfig", moved)
    with pytest.raises(
        SequenceParallelError, match=rf"lacks ContextParallelConfig\.{name}; .*diffusers>=0\.42"
    ):
        SequenceParallel([])


def test_attention_asks_the_mesh_for_nothing_but_its_group() -> None:
    source = inspect.getsource(attention_dispatch.TemplatedUlyssesAttention.forward)
    assert "_ulysses_mesh" in source
    assert "ulysses_mesh.get_group()" in source
    assert source.count("ulysses_mesh") == 3  # read from the config, named, asked


def test_the_plan_of_qwen_image_splits_what_we_know(transformer: QwenImageTransformer2DModel) -> None:
    plan = transformer._cp_plan
    inputs = {name for at, part in plan.items() if isinstance(part, dict) for name in part}
    assert inputs == {
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "modulate_index",
        0,
        1,
    }
    assert {at: len(sequence_parallel._parts(transformer, at)) for at in plan} == {
        "transformer_blocks.0": 1,
        "transformer_blocks.*": 2,
        "pos_embed": 1,
        "proj_out": 1,
    }


def test_diffusers_has_no_plan_where_ours_is() -> None:
    """Once it has one, ours goes."""
    assert {name: getattr(diffusers, name)._cp_plan for name in PLANS} == dict.fromkeys(PLANS)


def test_a_mask_of_image_and_text_is_split_as_both_are() -> None:
    shares = share_out(2, 3, 2)
    assert (shares.image, shares.text) == ((2, 1), (2, 3))
    assert [shares.joint(tokens) for tokens in (3, 5, 8)] == [False, False, True]


def test_degrees_divide_the_heads(transformer: QwenImageTransformer2DModel) -> None:
    parallel = SequenceParallel([transformer])
    for degree in (1, 2, 3, 6):
        parallel.check(degree)
    for degree in (0, 4, 5):
        with pytest.raises(
            SequenceParallelError, match=f"{degree} does not divide .* 6 .* use one of 1, 2, 3, 6"
        ):
            parallel.check(degree)


def test_what_cannot_be_split_is_refused(transformer: QwenImageTransformer2DModel) -> None:
    with pytest.raises(
        SequenceParallelError,
        match=r"Linear has no _cp_plan in diffusers .*, nor one of ours: .* use degree 1",
    ):
        SequenceParallel([nn.Linear(2, 2)])
    bare = nn.Linear(2, 2)
    bare._cp_plan = {"": {}}  # type: ignore[assignment]
    with pytest.raises(SequenceParallelError, match="Linear has no attention module with heads"):
        SequenceParallel([bare])
    with pytest.raises(SequenceParallelError, match=r"names 'blocks\.\*', which QwenImage.* does not have"):
        sequence_parallel._parts(transformer, "blocks.*")


def test_padding_is_masked_out(transformer: QwenImageTransformer2DModel) -> None:
    """What padding relies on: masked text of any content changes nothing but rounding."""
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(1, 6, 8, generator=generator), torch.randn(1, 3, 8, generator=generator)
    padded = torch.cat([text, torch.full((1, 2, 8), 7.0)], dim=1)
    mask = torch.tensor([[True, True, True, False, False]])
    common = {"timestep": torch.tensor([0.5]), "img_shapes": [[(1, 2, 3)]], "return_dict": False}
    with torch.no_grad():
        (whole,) = transformer(image, text, **common)
        (masked,) = transformer(image, padded, mask, **common)
    torch.testing.assert_close(masked, whole, rtol=0, atol=1e-5)
