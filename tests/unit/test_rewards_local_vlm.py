"""VLMs in a reward's own process: a small random Qwen3-VL, against an independent way to ask it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.unit.reward_server import reward_server
from tests.unit.vlm_oracle import PlainVlm

from spotlight_rewards.endpoints.chat import TOP_LOGPROBS, Question
from spotlight_rewards.endpoints.local_vlm import LocalVlm
from spotlight_rewards.endpoints.ocr_vlm import OcrVlm
from spotlight_rewards.endpoints.vlm_judge import QUESTIONS, VlmJudge
from spotlight_rewards.models.tiny_vlm import save_tiny_vlm
from spotlight_rewards.reward import RewardSetupError, SampleError
from spotlight_rewards.reward_registry import load, tiny_params

Record = Callable[[str, float], None]
Curves = Mapping[str, Sequence[float | SampleError]]
PROMPTS = ['a red sign that says "Yes"', 'dogs "No"', 'a "3"', 'two birds, left of "5"']
WORDS = ("Yes", "No", *"0123456789")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"), WORDS)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("sure"), ("Yes", "No"))


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = ((64, 64), (32, 96), (64, 64), (128, 32))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def local(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder), "device": "cpu", "batch_size": 3, **more}


def endpoint(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "model": "tiny", "concurrency": 1, "timeout_s": 30}


def judged(**where: Any) -> Curves:
    return VlmJudge(**where)(pictures(), PROMPTS, [{}] * 4)


def test_first_tokens_equal_an_independent_forward(folder: Path, record_property: Record) -> None:
    plain, question = PlainVlm(folder), QUESTIONS["yes-no"]
    questions = [question.replace("{prompt}", prompt) for prompt in PROMPTS]
    about = [Question(text, (image,)) for text, image in zip(questions, pictures(), strict=True)]
    answers = LocalVlm(**local(folder)).ask(about, tokens_max=1, logprobs=True)
    difference = 0.0
    for answer, image, asked in zip(answers, pictures(), questions, strict=True):
        assert not isinstance(answer, SampleError)
        assert answer.first_token is not None
        expected = plain.ask([image], asked, 1)[1][0].exp().topk(TOP_LOGPROBS)
        assert len(answer.first_token) <= TOP_LOGPROBS
        for token, value in zip(expected.indices.tolist(), expected.values.tolist(), strict=True):
            found = answer.first_token[plain.tokenizer.decode([token])]
            difference = max(difference, abs(found - value))
    record_property("vlm-judge/difference", difference)
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("words", "params"), [("sure", {}), ("folder", {"answer": "grade", "scale": (0, 9)})]
)
def test_judging_is_the_same_in_a_process_and_at_an_endpoint(
    request: pytest.FixtureRequest, words: str, params: dict[str, Any], record_property: Record
) -> None:
    model: Path = request.getfixturevalue(words)
    here = judged(model=local(model), **params)
    with reward_server(PlainVlm(model).serve) as server:
        there = judged(endpoint=endpoint(server.url), **params)
    assert set(here) == set(there)
    scores = [
        (one, other) for one, other in zip(here["score"], there["score"], strict=True)
        if not isinstance(one, SampleError) and not isinstance(other, SampleError)
    ]  # fmt: skip
    refused = [(str(one), str(other)) for one, other in zip(here["score"], there["score"], strict=True)
               if isinstance(one, SampleError) or isinstance(other, SampleError)]  # fmt: skip
    assert all(one == other for one, other in refused)
    difference = max(abs(one - other) for one, other in scores)
    record_property("vlm-judge/difference", difference)
    assert difference < 1e-4
    assert len({round(one, 3) for one, _ in scores}) > 1  # or they would prove little


def test_reading_is_the_same_in_a_process_and_at_an_endpoint(folder: Path) -> None:
    def read(**where: Any) -> Curves:
        return OcrVlm(tokens_max=4, **where)(pictures(), PROMPTS, [{}] * 4)

    here = read(model=local(folder))
    with reward_server(PlainVlm(folder).serve) as server:
        there = read(endpoint=endpoint(server.url))
    assert {name: here[name] for name in ("score", "exact", "cut_off")} == {
        name: there[name] for name in ("score", "exact", "cut_off")
    }
    assert all(isinstance(each, float) for each in here["score"])


def test_what_scores_is_reported_with_a_digest(sure: Path) -> None:
    scorer = VlmJudge(model=local(sure)).scored_by()
    assert scorer.startswith(f"{sure}@")
    VlmJudge(model=local(sure)).check([], [])


def test_tokens_are_counted(sure: Path) -> None:
    found = judged(model=local(sure))
    asked = PlainVlm(sure).spelled(QUESTIONS["yes-no"].replace("{prompt}", PROMPTS[0]))
    markup = len("user\n") + len("\n") + len("assistant\n") + 5  # and the marks of turns and picture
    assert found["prompt_tokens"][0] == markup + len(asked) + 64 * 64 / 32**2
    assert found["completion_tokens"] == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "params"),
    [("vlm-judge", {}), ("vlm-judge", {"answer": "grade", "scale": [1, 5]}), ("vlm-rank", {}),
     ("ocr-vlm", {}), ("geneval2", {}), ("unified-reward", {"train_on": "style"}), ("edit-score", {})],
)  # fmt: skip
def test_a_smoke_run_needs_neither_server_nor_download(
    name: str, params: dict[str, Any], tmp_path: Path
) -> None:
    params = params | {"endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}
    reward = load(name, params | (tiny_params(name, tmp_path, params) or {}))
    assert reward.check is not None
    reward.check([], [])
    Image.fromarray(pictures()[0]).save(tmp_path / "before.png")
    before = str(tmp_path / "before.png")
    records = [{"vqa_list": [["How many dogs are there?", "two"]], "reference": before}] * 2
    found = reward.function(pictures()[:2], PROMPTS[:1] * 2, records)
    assert isinstance(found, Mapping)
    assert [type(each) for each in found["score"]] == [float, float]


def test_a_network_that_breaks_is_an_error_of_each_sample(sure: Path, tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path, ("Yes", "No"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][:] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = judged(model=local(tmp_path))
    assert ["not finite" in str(each) for each in found["score"]] == [True] * 4


def test_mistakes_are_reported_with_the_remedy(sure: Path, tmp_path: Path) -> None:
    def refused(**params: Any) -> str:
        with pytest.raises(RewardSetupError) as caught:
            OcrVlm(**params).scored_by()
        return str(caught.value)

    both = refused(model=local(sure), endpoint={"base_url": "http://localhost", "model": "x"})
    assert "both endpoint and model" in both
    assert "neither endpoint nor model" in refused()
    assert "params.model.dtype is 'int8'" in refused(model=local(sure, dtype="int8"))
    assert "params.model.path" in refused(model={"device": "cpu"})
    # DeepSeek-OCR, whose class transformers lacks
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_deepseekocr.DeepseekOCRConfig"},
    }))  # fmt: skip
    unknown = refused(model=local(tmp_path))
    assert "params.endpoint" in unknown
    assert str(tmp_path) in unknown
    text_only = tmp_path / "text"
    save_tiny_vlm(text_only, ("Yes", "No"))
    (text_only / "chat_template.jinja").unlink()
    assert "no chat template" in refused(model=local(text_only))
