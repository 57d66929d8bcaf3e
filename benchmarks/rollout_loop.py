"""Our rollout loop against ``QwenImagePipeline.__call__``: same modules, latents, embeddings and steps.

    python -m benchmarks.rollout_loop
    python -m benchmarks.rollout_loop --device cuda --dtype bfloat16 --pipeline Qwen/Qwen-Image --height 512

Ours includes drawing the initial noise (counter-based; the pipeline is handed the latents) and, with
decoding, rounding to bytes and copying x0 to the host. In the column ``LoRA`` ours runs a second copy of the
transformer with an adapter, as training does; the pipeline has none. Before timing, the results are
compared, so it is the same work.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import QwenImagePipeline
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn

from benchmarks._measure import CLOCK_HELP, Clock, Report, Row, ratio, take_turns, wide_console
from spotlight.diffusion.samplers import ODE
from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.testbed import PIPELINE_DIR
from spotlight_rewards.base.prompts import PromptId

PROMPTS = (
    "a photo of a red circle",
    "a photo of two blue squares",
    "a photo of a green triangle left of a yellow circle",
    "a photo of three red triangles",
)
GROUP = 16
"""Images a prompt, as in a group of rollouts; larger batches hold several prompts and so need a mask."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Bench:
    """The two sides.

    Attributes:
        bare: the transformer that both run.
        slots: a copy of it with an adapter.
    """

    family: QwenImage
    bare: nn.Module
    slots: LoraSlots
    pipeline: QwenImagePipeline
    engine: Engine
    conditions: Sequence[Condition]
    negative: Condition
    size: MediaSize
    steps: int

    def start(self, batch: int, scale: float) -> list[RolloutState]:
        """Rollouts at pure noise, in groups."""
        rollouts = [
            Rollout(
                id=RolloutId(f"r{i}"),
                purpose=Purpose.EVAL,
                iteration=0,
                prompt_id=PromptId(str(i // GROUP)),
                member=i % GROUP,
                seed=i,
                steps=self.steps,
                version=PolicyVersion(0),
            )
            for i in range(batch)
        ]
        recipe = Recipe(self.size, ODE(), None, scale, "final")
        return self.engine.start(rollouts, self.conditions_of(batch), recipe)

    def conditions_of(self, batch: int) -> list[Condition]:
        """One condition a rollout."""
        return [self.conditions[i // GROUP % len(self.conditions)] for i in range(batch)]

    def ours(self, batch: int, scale: float, *, decode: bool, adapter: bool) -> list[RolloutState]:
        """Our loop, as the inline driver runs it; returns the final states."""
        states = self.start(batch, scale)
        chosen = self.slots.use("policy", merged=True) if adapter else nullcontext(self.bare)
        with chosen as model:
            while not all(state.done for state in states):
                states = self.engine.step(model, states)
        if decode:
            self.engine.finish(states)
        return states

    def theirs(self, batch: int, scale: float, *, decode: bool) -> Callable[[], Tensor]:
        """The pipeline's call, its inputs made beforehand; returns the final latents or the images."""
        latents = torch.stack([state.latents for state in self.start(batch, scale)]).to(self.family.dtype)
        prompt = self.family.collate(self.conditions_of(batch))
        negative = self.family.collate([self.negative] * batch) if scale > 1 else None

        def call() -> Tensor:
            images: Tensor = self.pipeline(
                prompt_embeds=prompt["embeds"],
                prompt_embeds_mask=prompt.mask("embeds"),
                negative_prompt_embeds=None if negative is None else negative["embeds"],
                negative_prompt_embeds_mask=None if negative is None else negative.mask("embeds"),
                true_cfg_scale=scale,
                height=self.size.height,
                width=self.size.width,
                num_inference_steps=self.steps,
                latents=latents,
                output_type="np" if decode else "latent",
            ).images
            return images

        return call

    def difference(self, batch: int, scale: float) -> float:
        """Largest difference of the final latents."""
        states = self.ours(batch, scale, decode=False, adapter=False)
        found = torch.stack([state.latents for state in states])
        return float((found - self.theirs(batch, scale, decode=False)().float()).abs().max())


def load(
    path: str, device: torch.device, dtype: torch.dtype, size: MediaSize, steps: int, cache: Path
) -> Bench:
    """Both sides. The adapter has the defaults of a run; at its start it changes no number."""
    family = QwenImage.load(path, device=device, dtype=dtype, embeddings_cache=cache)
    *conditions, negative = family.encode([*PROMPTS, " "])
    family.free_text_encoder()
    bare = copy.deepcopy(family.transformer)
    pipeline = QwenImagePipeline.from_pretrained(
        path, transformer=bare, vae=family.vae, text_encoder=None, tokenizer=None
    )
    pipeline.set_progress_bar_config(disable=True)
    slots = LoraSlots(family.transformer, LoraSpec(32, 64.0, family.lora_targets))
    engine = Engine(family, max_batch=1024, negative=negative)
    return Bench(family, bare, slots, pipeline, engine, conditions, negative, size, steps)


def measure(bench: Bench, batch: int, scale: float, decode: bool, rounds: int, clock: Clock) -> Row:
    """One line of the table."""
    seconds = take_turns(
        {
            "pipeline": bench.theirs(batch, scale, decode=decode),
            "ours": lambda: bench.ours(batch, scale, decode=decode, adapter=False),
            "ours, LoRA": lambda: bench.ours(batch, scale, decode=decode, adapter=True),
        },
        rounds,
        bench.family.device,
        clock,
    )
    return Row(
        case={
            "batch": str(batch),
            "guidance": f"{scale:g}" if scale > 1 else "none",
            "decode": "yes" if decode else "no",
        },
        seconds=seconds,
        ratios={
            "ours / pipeline": ratio(seconds["ours"], seconds["pipeline"]),
            "ours, LoRA / pipeline": ratio(seconds["ours, LoRA"], seconds["pipeline"]),
        },
    )


def main(
    pipeline: Annotated[str, typer.Option(help="Directory or hub id.")] = str(PIPELINE_DIR),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the transformer: float32 or bfloat16.")] = "float32",
    height: Annotated[int, typer.Option(help="Pixels.")] = 32,
    width: Annotated[int, typer.Option(help="Pixels.")] = 32,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 10,
    batch: Annotated[list[int], typer.Option(help="Images at once; repeatable.")] = [1, 16, 64],  # noqa: B006
    guidance: Annotated[list[float], typer.Option(help="True CFG; 1: none; repeatable.")] = [1.0, 4.0],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Rounds, at least; small batches get up to 8 times more.")] = 5,
    clock: Annotated[Clock, typer.Option(help=CLOCK_HELP)] = Clock.WALL,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time our rollout loop and the pipeline's own, taking turns."""
    where = torch.device(device)
    prepare_process(where, deterministic=False)  # as a run does, for both sides
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    console = wide_console()
    with tempfile.TemporaryDirectory() as cache:
        bench = load(pipeline, where, DTYPES[dtype], MediaSize(height, width), steps, Path(cache))
    rows: list[Row] = []
    counts: list[int] = []
    for size in batch:
        for scale in guidance:
            console.print(
                f"batch {size}, guidance {scale:g}: latents differ by {bench.difference(size, scale):.1e}"
            )
            for decode in (False, True):
                rounds = repeats * max(1, min(8, 64 // size // 2))
                rows.append(measure(bench, size, scale, decode, rounds, clock))
                counts.append(size)
    settings = {
        "pipeline": Path(pipeline).name,
        "dtype": dtype,
        "steps": steps,
        "size": [height, width],
        "clock": clock,
    }
    report = Report(f"Rollout loop, {steps} steps, {clock} time", where, settings, rows, "image", counts)
    report.show(console)
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
