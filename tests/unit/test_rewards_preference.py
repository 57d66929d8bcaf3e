"""Preference rewards on random tiny weights of the real classes, against CLIP in plain tensor operations."""

from __future__ import annotations

import json
import math
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tests.unit import clip_oracle as oracle
from tests.unit.reward_server import reward_server

from spotlight_rewards.frames import FrameRule
from spotlight_rewards.models import hub, pretrained_model
from spotlight_rewards.models.pretrained_model import find_file
from spotlight_rewards.models.vision_language import _Watch
from spotlight_rewards.preference.clip_rewards import Aesthetic, ClipScore, Hps, PickScore, cleaned
from spotlight_rewards.preference.open_clip_weights import converted_clip, prepare
from spotlight_rewards.preference.tiny_clip import random_checkpoint, save_spelling_tokenizer
from spotlight_rewards.reward import RewardSetupError
from spotlight_rewards.reward_registry import load, tiny_params

Record = Callable[[str, object], None]
PROMPTS = ["a red dog", "two cats, left of 3 chairs!", "a red dog", "n" * 200]
HEADS = 2
"""Of both towers of a tiny CLIP."""


def pictures(seed: int = 0) -> list[np.ndarray]:
    """Square, wide, tall with an odd rest, and smaller than what a model sees."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for height, width in ((32, 32), (40, 71), (77, 30), (15, 19))
    ]


def tokens_of(folder: str, prompt: str) -> list[int]:
    """One token per character, the last of a word another one; begin and end around at most 75."""
    vocabulary = json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]
    tokens: list[int] = []
    for word in spelled(prompt):
        tokens += [vocabulary[each] for each in word[:-1]] + [vocabulary[f"{word[-1]}</w>"]]
    return [vocabulary["<|startoftext|>"], *tokens[:75], vocabulary["<|endoftext|>"]]


def spelled(prompt: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]+", prompt)


def cosines(folder: str) -> list[float]:
    weights = load_file(Path(folder) / "model.safetensors")
    return [
        float(
            oracle.hub_picture(weights, oracle.cropped(image, 24), HEADS)
            @ oracle.hub_text(weights, tokens_of(folder, prompt), HEADS)
        )
        for image, prompt in zip(pictures(), PROMPTS, strict=True)
    ]


def compare(found: list[float], expected: list[float], name: str, record: Record) -> None:
    record(f"{name}/difference", max(abs(a - b) for a, b in zip(found, expected, strict=True)))
    assert found == pytest.approx(expected, rel=1e-6, abs=2e-6)
    assert np.ptp(found) > 1e-2  # or they would prove little


def test_clip_score_is_the_cosine(tmp_path: Path, record_property: Record) -> None:
    params = ClipScore().tiny(tmp_path)
    found = ClipScore(**params, batch_size=3)(pictures(), PROMPTS, [{}] * 4)
    compare(found["score"], cosines(params["model"]), "clip-score", record_property)
    assert found["truncated"] == [0, 0, 0, 1]


def test_pickscore_is_the_scaled_cosine(tmp_path: Path, record_property: Record) -> None:
    params = PickScore().tiny(tmp_path)
    scale = math.exp(load_file(Path(params["model"]) / "model.safetensors")["logit_scale"].item())
    found = PickScore(**params, batch_size=1)(pictures(), PROMPTS, [{}] * 4)
    expected = [scale * each / 26 for each in cosines(params["model"])]
    compare(found["score"], expected, "pickscore", record_property)
    assert found["truncated"] == [0, 0, 0, 1]


def test_aesthetic_is_the_mlp_on_the_unit_vector(tmp_path: Path, record_property: Record) -> None:
    params = Aesthetic().tiny(tmp_path)
    weights = load_file(Path(params["model"]) / "model.safetensors")
    (file,) = Path(params["head"]).iterdir()
    head = load_file(file)
    expected = []
    for image in pictures():
        x = oracle.hub_picture(weights, oracle.cropped(image, 24), HEADS)
        assert x.shape == (768,)
        for layer in (0, 2, 4, 6, 7):
            x = head[f"layers.{layer}.weight"] @ x + head[f"layers.{layer}.bias"]
        expected.append(float(x))
    found = Aesthetic(**params, batch_size=4)(pictures(), PROMPTS, [{}] * 4)
    compare(found, expected, "aesthetic", record_property)
    torch.save(head, tmp_path / "sac+logos+ava1-l14-linearMSE.pth")  # as it is published
    again = Aesthetic(**params | {"head": str(tmp_path)})(pictures(), PROMPTS, [{}] * 4)
    assert again == found


@pytest.mark.parametrize(("heads", "layers", "grid"), [((2, 2), (2, 3), 4), ((1, 3), (3, 1), 2)])
def test_hps_is_the_cosine_of_the_checkpoints_own_model(
    heads: tuple[int, int], layers: tuple[int, int], grid: int, tmp_path: Path, record_property: Record
) -> None:
    tokens = save_spelling_tokenizer(tmp_path)
    state = random_checkpoint(tokens, heads=heads, layers=layers, grid=grid, patch_px=6, seed=grid)
    torch.save({"state_dict": state, "epoch": 1}, tmp_path / "HPS_v2.1_compressed.pt")
    params = {"weights": str(tmp_path), "tokenizer": str(tmp_path)}
    found = Hps(**params, batch_size=3)(pictures(), PROMPTS, [{}] * 4)
    expected = [
        float(
            oracle.open_picture(state, oracle.padded(image, 6 * grid), heads[0])
            @ oracle.open_text(state, tokens_of(str(tmp_path), prompt), heads[1])
        )
        for image, prompt in zip(pictures(), PROMPTS, strict=True)
    ]
    compare(found["score"], expected, "hps", record_property)
    assert found["truncated"] == [0, 0, 0, 1]
    save_file(state, tmp_path / "weights.safetensors")
    again = Hps(**params | {"weights": str(tmp_path / "weights.safetensors")})(pictures(), PROMPTS, [{}] * 4)
    assert again["score"] == pytest.approx(found["score"], abs=1e-6)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (24, 13), (7, 24), (23, 25)])
def test_hps_pads_pictures_of_its_own_size_too(height: int, width: int) -> None:
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = prepare([image], 24)
    assert found.shape == (1, 3, 24, 24)
    torch.testing.assert_close(found[0].double(), oracle.padded(image, 24).double(), rtol=0, atol=1e-4)


def test_hps_reads_prompts_as_open_clip_cleans_them() -> None:
    assert cleaned("\u201ccurly\u201d quotes\u2019s &amp;amp; more, it&#39;s 5 < 6") == (
        "\"curly\" quotes's & more, it's 5 < 6"
    )
    assert cleaned(" \uff2f\uff30\uff25\uff2e \ufb01t caf\u00c3\u00a9 ") == "OPEN fit caf\u00e9"


def test_a_checkpoint_of_another_model_is_refused_tensor_by_tensor() -> None:
    state = random_checkpoint(20)
    for name in state:
        with pytest.raises(RewardSetupError, match=r"missing"):
            converted_clip({other: each for other, each in state.items() if other != name})
    with pytest.raises(RewardSetupError, match=r"the tensor 'score_predictor.weight' has no counterpart"):
        converted_clip({**state, "score_predictor.weight": torch.zeros(1)})
    with pytest.raises(RewardSetupError, match=r"the tensor 'visual.proj' gives \[15, 80\], not \[16, 80\]"):
        converted_clip({**state, "visual.proj": torch.zeros(80, 15)})
    with pytest.raises(RewardSetupError, match=r"width of visual.transformer.resblocks.0 is 81, not a multi"):
        converted_clip({**state, "visual.class_embedding": torch.zeros(81)})


def refusal(reward: Callable[..., Any], params: Mapping[str, Any]) -> str:
    with pytest.raises(RewardSetupError) as error:
        reward(**params)(pictures(), PROMPTS, [{}] * 4)
    return str(error.value)


def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path) -> None:
    params = ClipScore().tiny(tmp_path)
    assert "model is './gone', which is no directory. Name openai/clip-vit-large-patch14" in refusal(
        ClipScore, {"model": "./gone"}
    )
    assert "device is 'gpu'" in refusal(ClipScore, params | {"device": "gpu"})
    assert "batch_size is 0" in refusal(ClipScore, params | {"batch_size": 0})
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    message = refusal(PickScore, {"model": params["model"], "processor": empty})
    assert "pickscore reward: processor" in message
    assert "Name yuvalkirstain/PickScore_v1" in message
    assert "holds none of HPS_v2.1_compressed.safetensors, HPS_v2.1_compressed.pt. Name xswu/HPSv2" in (
        refusal(Hps, {"weights": empty, "tokenizer": params["model"]})
    )
    assert "is neither a file nor a directory" in refusal(Hps, {"weights": "./gone.pt"})
    narrow = Aesthetic().tiny(tmp_path / "aesthetic") | {"model": params["model"]}
    assert "whose embeddings are 16 wide; expected 768" in refusal(Aesthetic, narrow)


def test_a_failed_look_at_the_hub_is_kept_for_a_minute_a_good_one_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, now_s = iter(["away", ""]), [0.0]
    monkeypatch.setattr(hub, "_last", [])
    monkeypatch.setattr(hub, "_asked", lambda: next(answers))
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    found = []
    for now_s[0] in (0.0, 59.0, 61.0, 1000.0):
        found.append(hub.unreachable())
    assert found == ["away", "away", "", ""]


def test_a_file_downloaded_before_is_found_where_the_hub_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloaded(source: str, name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        if source == "org/there" and name == "b.pt":
            return str(tmp_path / name)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    monkeypatch.setattr(pretrained_model, "unreachable", lambda: "the hub cannot be reached")
    names, about = ("a.safetensors", "b.pt"), {"key": "x reward: weights", "remedy": "Name another."}
    assert find_file("org/there", names, **about) == tmp_path / "b.pt"
    with pytest.raises(RewardSetupError, match=r"no b\.pt is here\. the hub cannot be"):
        find_file("org/gone", names, **about)


def test_a_hub_that_is_away_is_reported_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def paused(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s to try again")

    monkeypatch.setattr(time, "sleep", paused)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    hub._last.clear()
    try:
        message = refusal(ClipScore, {"model": "org/gone"})
    finally:
        hub._last.clear()
    assert "http://127.0.0.1:1 cannot be reached (ConnectError" in message
    assert "not downloaded before" in message


def test_a_hub_that_answers_is_downloaded_from() -> None:
    with reward_server(lambda request, body: (503, b"")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        hub._last.clear()
        try:
            assert hub.unreachable() == ""
        finally:
            hub._last.clear()


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
            return Path.touch, (Path(tmp_path / "ran"),)  # type: ignore[return-value]

    for name in ("HPS_v2.1_compressed.pt", "sac+logos+ava1-l14-linearMSE.pth"):
        (tmp_path / name).write_bytes(pickle.dumps({"state_dict": Runs()}))
    assert "holds no readable weights" in refusal(Hps, {"weights": str(tmp_path)})
    assert "holds no readable weights" in refusal(Aesthetic, {"head": str(tmp_path)})
    assert not (tmp_path / "ran").exists()


def test_masked_tokens_are_no_overflow_of_a_language_model() -> None:
    inf, nan = float("inf"), float("nan")
    watch = _Watch()
    watch(torch.empty(0), torch.tensor([[0.0, -inf], [0.0, 1.0], [0.0, nan], [inf, 0.0], [-inf, -inf]]))
    watch(torch.empty(0), torch.tensor([[0.0, -inf], [0.0, nan], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert watch.finite == [True, False, False, False, False]


def test_a_head_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    params = Aesthetic().tiny(tmp_path)
    (file,) = Path(params["head"]).iterdir()
    tensors = load_file(file)
    del tensors["layers.7.bias"]
    save_file(tensors, file)
    assert "tensor 'layers.7.bias' is missing" in refusal(Aesthetic, params)


def test_weights_that_are_not_numbers_are_an_error_and_not_a_zero(tmp_path: Path) -> None:
    params = ClipScore().tiny(tmp_path)
    file = Path(params["model"]) / "model.safetensors"
    tensors = load_file(file)
    tensors["visual_projection.weight"][0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="clip-score reward: the model returned numbers that are not finite"):
        ClipScore(**params)(pictures(), PROMPTS, [{}] * 4)


@pytest.mark.parametrize("name", ["pickscore", "hps", "clip-score", "aesthetic"])
def test_videos_are_scored_by_their_frames(name: str, tmp_path: Path) -> None:
    params = tiny_params(name, tmp_path, {})
    assert params is not None
    reward = load(name, params, FrameRule(2, "min"))
    assert reward.scored_by is not None
    assert "@" in str(reward.scored_by())
    frames = np.stack([pictures()[0], pictures(1)[0]])
    scored = [score_of(reward.function([each], PROMPTS[:1], [{}])) for each in (frames, *frames)]
    assert scored[0] == pytest.approx(min(scored[1:]), rel=1e-6, abs=1e-6)
    assert score_of(reward.function([], [], [])) is None


def score_of(found: Any) -> Any:
    scores = found["score"] if isinstance(found, dict) else found
    return scores[0] if scores else None
