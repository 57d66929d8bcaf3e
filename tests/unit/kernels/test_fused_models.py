"""A transformer of every family predicts the same velocity with fused operators, and learns the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_z_image
from fused_world import CPU, Predicting, far

from spotlight.models import peft_layers
from spotlight.models.kernels.fused import is_fused, use_fused, use_reference
from spotlight_files.model_errors import ModelError
from spotlight_kernels import fuse as fusing
from spotlight_kernels import registered


@pytest.mark.parametrize(
    "name",
    [
        *("flux", "flux2-klein", "hunyuan-video", "qwen-image", "qwen-image-2.1", "sd3", "wan", "z-image"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hunyuan-video-1.5", "krea-2")),
    ],
)
def test_a_model_computes_fused_what_it_does_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "distance", lambda *_: 0.0)  # test_fused_blocks.py compares
    monkeypatch.setattr(transformer_z_image, "SEQ_MULTI_OF", 2)  # tokens are slow
    predicting = Predicting(name, tmp_path)
    wanted, exact = predicting.gradients(), predicting.exact_gradients()
    assert use_fused(predicting.model, CPU, asked=True)
    peft_layers.fuse(predicting.model)
    model: Any = predicting.model
    model.enable_gradient_checkpointing()
    found = predicting.gradients()
    assert len(found) == len(wanted) == len(exact), "what has no gradient has none fused, either"
    assert max(map(far, found, exact)) < 1e-5
    # Krea 2's own are that far from float64.
    assert max(map(far, found, wanted)) < 1e-5 or max(map(far, wanted, exact)) > 1e-5
    assert not torch.equal(found[0], wanted[0]), "other operators ran"
    with torch.no_grad():
        assert torch.equal(predicting(), found[0])
    model.disable_gradient_checkpointing()
    use_reference(model)
    assert all(map(torch.equal, predicting.gradients(), wanted))


def test_where_triton_cannot_compile_nothing_is_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **options: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(registered.heads_forward, "launch", fails)
    predicting = Predicting("qwen-image", tmp_path)
    assert not use_fused(predicting.model, CPU, asked=False)
    assert not any(map(is_fused, predicting.model.modules()))
    with pytest.raises(ModelError, match=r"'fused', and Triton cannot make one .* Failed to find C compiler"):
        use_fused(predicting.model, CPU, asked=True)
