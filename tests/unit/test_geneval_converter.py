"""OpenMMLab's weights in transformers: every tensor moved, none missing, and the same outputs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.openmmlab_forward import Shape, Weights, forward, random_checkpoint
from tests.unit.test_fork import files_of_at_most
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.geneval.mask2former import UNREAD
from spotlight_rewards.geneval.openmmlab import convert_checkpoint, converted_model
from spotlight_rewards.models.pretrained_model import load_pretrained
from spotlight_rewards.reward import RewardSetupError

SHAPE = Shape()
BLOCK = "backbone.stages.0.blocks.0.attn.w_msa"


def in_float64(state: Weights) -> dict[str, torch.Tensor]:
    return {name: each.double() if each.is_floating_point() else each for name, each in state.items()}


@pytest.mark.parametrize(
    ("shape", "height", "width"),
    [(SHAPE, 128, 160), (replace(SHAPE, depths=(1, 2, 1, 1), window=2, attention_heads=2), 192, 96)],
)
def test_outputs_equal_those_of_a_plain_forward_on_the_checkpoint_itself(
    shape: Shape, height: int, width: int
) -> None:
    state = random_checkpoint(shape, seed=height)
    model = converted_model(state).double()
    pixels = torch.randn(3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(pixel_values=pixels[None])
        classes, masks = forward(in_float64(state), shape, pixels)
    assert classes.std() > 0.1
    assert masks.std() > 0.1
    torch.testing.assert_close(found.class_queries_logits[0], classes, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.masks_queries_logits[0], masks, rtol=0, atol=1e-10)


def test_every_tensor_of_the_checkpoint_matters_to_that_comparison() -> None:
    state = {
        name: each.requires_grad_(each.is_floating_point())
        for name, each in in_float64(random_checkpoint(SHAPE)).items()
    }
    pixels = torch.randn(3, 128, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    classes, masks = forward(state, SHAPE, pixels)
    (classes.square().mean() + masks.square().mean()).backward()
    moved = {name: each.grad.abs().max() for name, each in state.items() if each.grad is not None}
    assert not [name for name, gradient in moved.items() if gradient < 1e-12]
    assert state.keys() - moved.keys() == {name for name in state if name.endswith("_index")}


def test_weights_that_inference_does_not_read_do_not_matter() -> None:
    import re

    model = converted_model(random_checkpoint(SHAPE))
    pixels = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        before = model(pixel_values=pixels)
        unread = [each for name, each in model.state_dict().items() if re.search(UNREAD, name)]
        assert len(unread) == 3
        for each in unread:
            each.normal_()
        after = model(pixel_values=pixels)
    assert torch.equal(before.class_queries_logits, after.class_queries_logits)
    assert torch.equal(before.masks_queries_logits, after.masks_queries_logits)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "detector.pth"
    torch.save({"meta": {"epoch": 50}, "state_dict": random_checkpoint(SHAPE)}, path)
    named = path.with_name(f"detector-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth")
    return path.rename(named)


def test_the_command_writes_what_transformers_reads_back_to_the_bit(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import Mask2FormerForUniversalSegmentation

    done = CliRunner().invoke(app, ["rewards", "convert-geneval", str(checkpoint), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    state = torch.load(checkpoint)["state_dict"]
    assert f"{len(state)} tensors" in done.output
    model, identity = load_pretrained(
        Mask2FormerForUniversalSegmentation,
        str(tmp_path / "out"), key="detector", remedy="", unread=UNREAD, device=torch.device("cpu"),
    )  # fmt: skip
    assert identity.startswith(f"openmmlab/{checkpoint.name}:{checkpoint.stem[-8:]}@")
    expected = converted_model(state)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    pixels = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        assert torch.equal(
            model(pixel_values=pixels).masks_queries_logits,
            expected(pixel_values=pixels).masks_queries_logits,
        )
    with pytest.raises(RewardSetupError, match="is not empty"):
        convert_checkpoint(checkpoint, tmp_path / "out")


def test_a_full_disk_is_told_and_leaves_no_half_of_a_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "out").mkdir()
    half_made = lambda path: 0 if any((tmp_path / "out").iterdir()) else 2**30  # noqa: E731
    monkeypatch.setattr("spotlight_rewards.base.file_errors.free_bytes", half_made)
    with (
        files_of_at_most(60_000),
        pytest.raises(StoreError, match=r"the detector: .* no space left \(0 B free"),
    ):
        convert_checkpoint(checkpoint, tmp_path / "link")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with files_of_at_most(60_000):
        done = CliRunner().invoke(app, ["tiny", "qwen-image", "out"])
    assert done.exit_code == 2
    assert "cannot write a small pipeline: out: no space left" in done.output
    assert not (tmp_path / "out").exists()


def refusal(state: object, tmp_path: Path) -> str:
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(RewardSetupError) as error:
        convert_checkpoint(tmp_path / "bad.pth", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def test_checkpoints_that_do_not_map_one_to_one_are_refused_by_name(tmp_path: Path) -> None:
    state = random_checkpoint(SHAPE)
    for name in ("panoptic_head.mask_embed.2.bias", "backbone.norm1.weight", f"{BLOCK}.qkv.bias"):
        less = {other: each for other, each in state.items() if other != name}
        assert "missing" in refusal({"state_dict": less}, tmp_path)
    for name in ("panoptic_head.cls_embed.scale", "neck.weight", "panoptic_head.mask_embed.6.weight"):
        more = state | {name: torch.zeros(1)}
        assert f"the tensor '{name}' has no counterpart" in refusal({"state_dict": more}, tmp_path)
    index = f"{BLOCK}.relative_position_index"
    assert index in refusal({"state_dict": state | {index: state[index].flip(0)}}, tmp_path)
    panoptic = random_checkpoint(replace(SHAPE, classes=133))
    message = "the tensor 'panoptic_head.cls_embed.weight' gives [134, 64], not [81, 64]"
    assert message in refusal({"state_dict": panoptic}, tmp_path)


def test_files_that_are_no_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "cannot be read as a checkpoint (KeyError" in refusal({"model": {}}, tmp_path)
    code = refusal({"state_dict": {}, "meta": Path("code")}, tmp_path)
    assert "cannot be read as a checkpoint (UnpicklingError: it is no pickle of tensors" in code
    with pytest.raises(RewardSetupError, match="FileNotFoundError"):
        convert_checkpoint(tmp_path / "gone.pth", tmp_path / "out")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(RewardSetupError, match=r"it is damaged. Download it again."):
        convert_checkpoint(checkpoint, tmp_path / "out")
