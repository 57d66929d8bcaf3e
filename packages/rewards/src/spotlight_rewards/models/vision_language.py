"""A vision-language model in this process: any class of transformers that answers questions about pictures.

Imports torch. The adapter to the processors' classes is here, too: :func:`_processor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image as PILImage

from spotlight_rewards.endpoints.chat import TOP_LOGPROBS, ChatAnswer, Question, TokenCount
from spotlight_rewards.models.batches import in_batches
from spotlight_rewards.models.pretrained_model import (
    find_device,
    first_line,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
    where_from,
)
from spotlight_rewards.reward import RewardSetupError, SampleError

_REMEDY = (
    "Name one that it loads as AutoModelForImageTextToText, such as Qwen/Qwen3-VL-8B-Instruct, by hub id or "
    "directory. Others, such as deepseek-ai/DeepSeek-OCR, can be served by vLLM or SGLang: then give "
    "params.endpoint instead."
)
_NOTHING = r"(?!)"


class VisionLanguageModel:
    """A model with its processor; greedy answers in batches.

    Args:
        source: hub id or directory.
        key: the reward and its parameter, for messages.
        device: as :func:`find_device` takes it.
        dtype: a name of torch's; ``auto``: bfloat16 on a GPU, float32 on a CPU.
        batch_size: questions in a forward.
        template: further variables of the chat template.

    Raises:
        RewardSetupError: transformers has no class for it, or weights, processor or device cannot be used.
    """

    def __init__(
        self, source: str, *, key: str, device: str, dtype: str, batch_size: int, template: Mapping[str, Any]
    ) -> None:
        from transformers import AutoModelForImageTextToText, GenerationConfig

        self._device, self._batch_size, self._template = find_device(device, key), batch_size, template
        if dtype == "auto":
            dtype = "float32" if self._device.type == "cpu" else "bfloat16"
        self._model, self.identity = load_pretrained(
            AutoModelForImageTextToText, source, key=key, remedy=_REMEDY, unread=_NOTHING,
            device=self._device, dtype=getattr(torch, dtype),
        )  # fmt: skip
        self._processor = _processor(type(self._model.config), source, key)
        tokenizer, own = self._processor.tokenizer, self._model.generation_config
        ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        # Greedy, and without the checkpoint's own sampling settings, such as a penalty of repetitions.
        self._model.generation_config = GenerationConfig(
            do_sample=False, bos_token_id=own.bos_token_id, eos_token_id=sorted(self._ends),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self._ends),
        )  # fmt: skip

    def ask(
        self, questions: Sequence[Question], *, tokens_max: int, logprobs: bool
    ) -> list[ChatAnswer | SampleError]:
        """Answer them, in order."""
        parts = in_batches(questions, self._batch_size)
        return [answer for part in parts for answer in self._ask(part, tokens_max, logprobs)]

    @torch.inference_mode()
    def _ask(
        self, questions: Sequence[Question], tokens_max: int, logprobs: bool
    ) -> list[ChatAnswer | SampleError]:
        inputs = self._processor.apply_chat_template(
            [_turn(question) for question in questions],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"}, **self._template,
        ).to(self._device, dtype=self._model.dtype)  # fmt: skip
        watch = _Watch()
        tokens = self._model.generate(**inputs, max_new_tokens=tokens_max, logits_processor=[watch])
        written = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        prompts = inputs["attention_mask"].sum(1).tolist()
        first = _candidates(self._processor.tokenizer, watch.first) if logprobs else [None] * len(written)
        return [
            self._answer(own, asked, candidates, tokens_max)
            if finite
            else SampleError(
                "the model's output is not finite; expected numbers. Set params.model.dtype: float32."
            )
            for own, asked, candidates, finite in zip(written, prompts, first, watch.finite, strict=True)
        ]

    def _answer(
        self, written: list[int], asked: int, candidates: Mapping[str, float] | None, tokens_max: int
    ) -> ChatAnswer:
        ended = [at for at, token in enumerate(written) if token in self._ends]
        own = written[: ended[0] + 1] if ended else written
        text = self._processor.tokenizer.decode(own, skip_special_tokens=True)
        cut_off = not ended and len(own) == tokens_max
        return ChatAnswer(text, cut_off, candidates, TokenCount(asked, len(own)))


class _Watch:
    """Keeps the first token's logits [batch, vocabulary], and which rows' logits could always be read.

    -inf is a token that cannot be said; NaN, +inf, or no finite number are the result of an overflow.
    """

    def __init__(self) -> None:
        self.first = self._finite = torch.empty(0)

    def __call__(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        finite = ~(logits.isnan() | logits.isposinf()).any(-1) & logits.isfinite().any(-1)
        if not len(self.first):
            self.first, self._finite = logits.float(), finite
        self._finite = self._finite & finite
        return logits

    @property
    def finite(self) -> list[bool]:
        """By row."""
        found: list[bool] = self._finite.tolist()
        return found


def _candidates(tokenizer: Any, logits: torch.Tensor) -> list[dict[str, float]]:
    """Probabilities of as many first tokens as endpoints give; those of one spelling are added."""
    top = logits.softmax(-1).topk(min(TOP_LOGPROBS, logits.shape[-1]))
    rows: list[dict[str, float]] = []
    for tokens, probabilities in zip(top.indices.tolist(), top.values.tolist(), strict=True):
        row: dict[str, float] = {}
        for token, probability in zip(tokens, probabilities, strict=True):
            spelling = tokenizer.decode([token])
            row[spelling] = row.get(spelling, 0.0) + probability
        rows.append(row)
    return rows


def _turn(question: Question) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [
        {"type": "image", "image": PILImage.fromarray(picture)} for picture in question.pictures
    ]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]


def _processor(config_class: type, source: str, key: str) -> Any:
    """The model's processor for pictures and text alone.

    transformers makes it with all its parts, of which those for videos need torchvision.

    Raises:
        RewardSetupError: it cannot be made, or has no chat template.
    """
    from transformers import PROCESSOR_MAPPING

    known = PROCESSOR_MAPPING.get(config_class, None)
    if known is None:
        raise RewardSetupError(
            f"{key} is {source!r}, for which transformers has no processor of pictures and text. {_REMEDY}"
        )

    class PicturesAndText(known):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            return None if part is None else super().check_argument_for_proper_class(name, part)

    image_processor = load_image_processor(source, key=key, remedy=_REMEDY)
    parts = {"image_processor": image_processor, "tokenizer": load_tokenizer(source, key=key, remedy=_REMEDY)}
    try:
        place, options = where_from(source)
        settings, _ = known.get_processor_dict(place, **options)
        names = PicturesAndText.get_attributes()
        processor = PicturesAndText.from_args_and_dict([parts.get(name) for name in names], settings)
    except Exception as error:
        raise RewardSetupError(
            f"{key} is {source!r}, whose {known.__name__} cannot be made for pictures and text: "
            f"{first_line(error)}. {_REMEDY}"
        ) from error
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    if not processor.chat_template:
        raise RewardSetupError(
            f"{key} is {source!r}, which has no chat template; expected one that says how it is asked. "
            "Name an instruction-tuned model."
        )
    return processor
