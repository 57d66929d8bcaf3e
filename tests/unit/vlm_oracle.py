"""Qwen3-VL asked one question at a time, without processor, padding, cache or generation: an independent way.

Patches and tokens are made here; only the network itself is transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.unit.reward_server import Reply, completion, picture_in, question_in
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

PATCH_PX, MERGED = 16, 2


class PlainVlm:
    """A saved model. Pictures have sides of multiples of 32 px, up to 128 px."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end = self.id_of("<|im_end|>")

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    @torch.no_grad()
    def ask(
        self, images: Sequence[np.ndarray], question: str, tokens_max: int
    ) -> tuple[str, list[torch.Tensor]]:
        """The text, and the log-probabilities of each of its tokens' candidates."""
        grids = [(1, image.shape[0] // PATCH_PX, image.shape[1] // PATCH_PX) for image in images]
        pixels = torch.cat([patches(image) for image in images])
        pad = self.id_of("<|image_pad|>")
        shown = [
            token
            for _, height, width in grids
            for token in (
                self.id_of("<|vision_start|>"),
                *[pad] * (height * width // MERGED**2),
                self.id_of("<|vision_end|>"),
            )
        ]
        ids = [
            self.id_of("<|im_start|>"), *self.spelled("user\n"), *shown, *self.spelled(question),
            self.end, *self.spelled("\n"), self.id_of("<|im_start|>"), *self.spelled("assistant\n"),
        ]  # fmt: skip
        written: list[int] = []
        log_probs: list[torch.Tensor] = []
        for _ in range(tokens_max):
            tokens = torch.tensor([ids + written])
            logits = self.model(
                input_ids=tokens, pixel_values=pixels, use_cache=False,
                image_grid_thw=torch.tensor(grids), mm_token_type_ids=(tokens == pad).int(),
            ).logits[0, -1]  # fmt: skip
            log_probs.append(logits.double().log_softmax(-1))
            if (token := int(logits.argmax())) == self.end:
                break
            written.append(token)
        return self.tokenizer.decode(written), log_probs

    def spelled(self, text: str) -> list[int]:
        """Words the model answers with are one token, all else is bytes."""
        return [int(each) for each in self.tokenizer(text)["input_ids"]]

    def serve(self, request: Any, body: Any) -> Reply:
        """As vLLM does: a completion with the first token's candidates."""
        text, log_probs = self.ask([picture_in(body)], question_in(body), body["max_tokens"])
        top = log_probs[0].topk(body.get("top_logprobs", 1))
        candidates = {
            self.tokenizer.decode([token]): value
            for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        }
        cut_off = len(log_probs) == body["max_tokens"] and int(log_probs[-1].argmax()) != self.end
        return completion(text, top=candidates, finish="length" if cut_off else "stop")


def patches(image: np.ndarray) -> torch.Tensor:
    """[patches, 3 channels x 2 frames x 16 x 16], in squares of 2 x 2 patches."""
    height, width = image.shape[0] // PATCH_PX, image.shape[1] // PATCH_PX
    pixels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    rows = []
    for top in range(0, height, MERGED):
        for left in range(0, width, MERGED):
            for row in range(top, top + MERGED):
                for column in range(left, left + MERGED):
                    ys, xs = row * PATCH_PX, column * PATCH_PX
                    patch = pixels[:, ys : ys + PATCH_PX, xs : xs + PATCH_PX]
                    rows.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(rows)
