"""Our learner's optimizer step against a plain PyTorch loop of the same passes.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --algorithm diffusion-nft --mode lora --samples 64 --micro-batch 64

Both make the same number of forwards and backwards over the same samples, with the same LoRA (peft) and
the same fused AdamW; the plain loop switches weights through diffusers' public ``set_adapter`` and has its
batches ready. Before timing, the gradient norms of both are compared, so it is the same work.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, cast

import torch
import typer
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from rich.console import Console
from torch import Tensor, nn

from benchmarks._measure import CLOCK_HELP, Clock, Report, Row, ratio, take_turns, wide_console
from spotlight.algorithms import Algorithm, TrainBatch, build_algorithm
from spotlight.algorithms.advantages import advantages
from spotlight.algorithms.forward_process import noised
from spotlight.config.sections.algorithm import AdvantageConfig, DiffusionNFTConfig, FlowGRPOConfig
from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.diffusion.samplers import ODE, FlowSDE
from spotlight.diffusion.schedule import AllSteps
from spotlight.models.condition import Condition, ConditionBatch
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import CopySlots, LoraSlots, Slot, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.testbed import PIPELINE_DIR
from spotlight.training.batching.batch import stack
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import PromptId

PROMPTS = ("a photo of a red circle", "a photo of a green triangle left of a yellow circle")
GROUP = 8
STEPS = 4
"""Denoising steps of the samples: three are stochastic, and all three are trained."""
TIMESTEPS = STEPS - 1
SAMPLER = FlowSDE(0.7)
LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 1e-4
RANK, ALPHA = 32, 64.0
Mode = Literal["lora", "full"]
Draw = Callable[[TrainBatch, int], tuple[Tensor, Tensor]]
"""x_t and t of a training timestep."""


def make_algorithm(name: str) -> Algorithm:
    """As configured by default, with :data:`TIMESTEPS` passes per sample."""
    if name == "flow-grpo":
        return build_algorithm(FlowGRPOConfig(old_log_probs="recompute"), SAMPLER)
    return build_algorithm(DiffusionNFTConfig(train_timesteps=TIMESTEPS), ODE())


def make_learner(
    family: QwenImage,
    name: str,
    mode: Mode,
    size: MediaSize,
    timesteps_per_pass: int = 1,
    ranks: Ranks | None = None,
) -> Learner:
    """Ours, on a transformer of its own."""
    own = copy.copy(family)
    own.transformer = copy.deepcopy(family.transformer)
    algorithm = make_algorithm(name)
    slots: WeightSlots
    if mode == "lora":
        spec = LoraSpec(RANK, ALPHA, family.lora_targets)
        slots = LoraSlots(own.transformer, spec, algorithm.extra_slots)
    else:
        slots = CopySlots(own.transformer, algorithm.extra_slots)
    settings = LearnerConfig(
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        timesteps_per_pass=timesteps_per_pass,
    )
    return Learner(own, slots, algorithm, settings, size=size, ranks=ranks)


def roll_out(learner: Learner, conditions: Sequence[Condition], count: int) -> list[TrainingSample]:
    """Samples of groups in turn, by the learner's own weights, with made-up rewards."""
    algorithm, family = learner.algorithm, learner.family
    size = MediaSize(32, 32)
    window = AllSteps() if algorithm.sampler.stochastic else None
    rollouts = [
        Rollout(
            id=RolloutId(f"r{i}"),
            purpose=Purpose.TRAIN,
            iteration=0,
            prompt_id=PromptId(str(i // GROUP)),
            member=i % GROUP,
            seed=i,
            steps=STEPS,
            version=PolicyVersion(0),
        )
        for i in range(count)
    ]
    texts = [conditions[i // GROUP % len(conditions)] for i in range(count)]
    engine = Engine(family, max_batch=32)
    with learner.slots.use(algorithm.rollout_slot) as model:
        states = engine.start(rollouts, texts, Recipe(size, algorithm.sampler, window, 1.0, algorithm.keeps))
        results = engine.run(model, states)
    rewards = [{"quality": float(i * 7919 % 13)} for i in range(count)]
    groups = [rewards[i : i + GROUP] for i in range(0, count, GROUP)]
    scaled = [value for row in advantages(groups, {"quality": 1.0}, AdvantageConfig()) for value in row]
    return [
        TrainingSample(
            key=result.rollout.id,
            group=result.rollout.prompt_id,
            advantage=advantage,
            condition=text,
            seed=result.rollout.seed,
            version=0,
            tensors=result.tensors,
        )
        for result, text, advantage in zip(results, texts, scaled, strict=True)
        if isinstance(result, FinishedRollout)
    ]


def made_now(learner: Learner, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """As if the learner's weights had made them: ratios are to those."""
    return [replace(sample, version=learner.steps) for sample in samples]


def ours(learner: Learner, samples: Sequence[TrainingSample], micro_batch: int) -> float:
    """One update through the learner; returns the gradient norm."""
    samples = made_now(learner, samples)
    keys = [sample.key for sample in samples]
    micro_batches = [keys[i : i + micro_batch] for i in range(0, len(keys), micro_batch)]
    learner.prepare(samples, micro_batches)
    for micro in micro_batches:
        learner.accumulate(micro, len(samples))
    norm = learner.step().grad_norm
    learner.finish_batch()
    return norm


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """A micro-batch, stacked beforehand."""

    tensors: TrainBatch
    text: ConditionBatch


class Adapters(Protocol):
    """What diffusers gives a model for adapters."""

    def add_adapter(self, config: LoraConfig, name: str) -> None:
        """Inject one and make it the active one."""

    def set_adapter(self, name: str) -> None:
        """Choose the one that runs and trains."""

    def enable_adapters(self) -> None:
        """After :meth:`disable_adapters`."""

    def disable_adapters(self) -> None:
        """Run the base alone."""


class Plain:
    """The loop one would write by hand."""

    def __init__(self, learner: Learner, family: QwenImage, size: MediaSize) -> None:
        self.family, self.size = family, size
        self.extra: list[Slot] = [slot for slot in learner.algorithm.extra_slots if slot != "reference"]
        self.lora = isinstance(learner.slots, LoraSlots)
        self.module = copy.deepcopy(family.transformer)
        self.adapters = cast(Adapters, self.module)
        self.active: Slot | None = None
        self.frozen: dict[Slot, nn.Module] = {}
        if self.lora:
            for slot in ("policy", *self.extra):
                config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(family.lora_targets))
                self.adapters.add_adapter(config, slot)
            self._copy_adapters(learner.slots)
        else:
            self.frozen = {s: copy.deepcopy(self.module) for s in learner.algorithm.extra_slots}
            self.module.requires_grad_(True)
        self.use("policy")
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def _copy_adapters(self, slots: WeightSlots) -> None:
        parameters = dict(self.module.named_parameters())
        for slot in ("policy", *self.extra):
            for name, value in slots.state(slot).items():
                parameters[name.replace(".weight", f".{slot}.weight")].copy_(value)

    def use(self, slot: Slot) -> nn.Module:
        """The module under a slot's weights."""
        if not self.lora:
            return self.frozen.get(slot, self.module)
        if slot == self.active:
            return self.module
        if slot == "reference":
            self.adapters.disable_adapters()
        else:
            self.adapters.enable_adapters()
            self.adapters.set_adapter(slot)
        self.active = slot
        return self.module

    def velocity(self, batch: PlainBatch, x: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        """[batch, tokens, channels]."""
        return self.family.velocity(self.use(slot), x, sigma, batch.text, None, self.size)

    def finish(self) -> float:
        """Clip, step, and forget the gradients; returns the norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.trained, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """old <- decay old + (1 - decay) policy."""
        pairs = (
            [(self.frozen["old"].get_parameter(name), p) for name, p in self.module.named_parameters()]
            if not self.lora
            else [
                (self.module.get_parameter(name.replace(".policy.", ".old.")), p)
                for name, p in self.module.named_parameters()
                if ".policy." in name
            ]
        )
        for old, policy in pairs:
            old.lerp_(policy, 1 - decay)


def plain_flow_grpo(plain: Plain, batches: Sequence[PlainBatch], samples: int) -> float:
    """The first update of a batch of Flow-GRPO: ratios to this pass's own log-probs."""
    params = FlowGRPOConfig()
    for batch in batches:
        advantage = batch.tensors.advantages
        for step in range(TIMESTEPS):
            log_prob = _log_prob(plain, batch, step)
            ratios = torch.exp(log_prob - log_prob.detach())
            clipped = ratios.clamp(1 - params.clip_range, 1 + params.clip_range)
            loss = torch.maximum(-advantage * ratios, -advantage * clipped)
            (loss.sum() / (samples * TIMESTEPS)).backward()  # type: ignore[no-untyped-call]
    return plain.finish()


def _log_prob(plain: Plain, batch: PlainBatch, step: int) -> Tensor:
    latents, sigmas = batch.tensors.latents, batch.tensors.sigmas
    assert latents is not None
    x, sigma, sigma_next = latents[:, step], sigmas[:, step], sigmas[:, step + 1]
    moments = SAMPLER.moments(x, plain.velocity(batch, x, sigma), sigma, sigma_next)
    return SAMPLER.log_prob(latents[:, step + 1], moments)


def plain_diffusion_nft(plain: Plain, batches: Sequence[PlainBatch], samples: int, draw: Draw) -> float:
    """An update of DiffusionNFT with its default weights."""
    params = DiffusionNFTConfig()
    for batch in batches:
        x0, advantage = batch.tensors.final, batch.tensors.advantages
        rho = (advantage / (2 * params.advantage.clip) + 0.5).clamp(0, 1)
        for step in range(TIMESTEPS):
            x, t = draw(batch.tensors, step)
            with torch.no_grad():
                old = plain.velocity(batch, x, t, "old")
                reference = plain.velocity(batch, x, t, "reference")
            velocity = plain.velocity(batch, x, t)
            away, column = params.beta * (velocity - old), t.view(-1, 1, 1)
            errors = [x - column * (old + sign * away) - x0 for sign in (1, -1)]
            positive, negative = (
                error.square().mean((1, 2)) / error.detach().abs().mean((1, 2)).clamp(min=1e-5)
                for error in errors
            )
            loss = params.advantage.clip * (rho * positive + (1 - rho) * negative) / params.beta
            loss = loss + params.reference_weight * (velocity - reference).square().mean((1, 2))
            (loss.sum() / (samples * TIMESTEPS)).backward()  # type: ignore[no-untyped-call]
    norm = plain.finish()
    plain.follow(params.old_policy.decay(1))
    return norm


def draw_again(batch: TrainBatch, step: int) -> tuple[Tensor, Tensor]:
    """As one would by hand: torch's generator, a stratified noise level."""
    x0 = batch.final
    t = (step + torch.rand(x0.shape[0], device=x0.device)) / TIMESTEPS
    return torch.lerp(x0, torch.randn_like(x0), t.view(-1, 1, 1)), t


def draw_as_ours(batch: TrainBatch, step: int) -> tuple[Tensor, Tensor]:
    """The learner's own draws, to compare gradients."""
    x, t, _ = noised(batch, step, TIMESTEPS, "uniform")
    return x, t


def measure(
    family: QwenImage,
    conditions: Sequence[Condition],
    name: str,
    mode: Mode,
    sizes: tuple[int, int],
    rounds: int,
    clock: Clock,
    console: Console,
) -> Row:
    """One line of the table. ``sizes``: samples of an update and of a micro-batch."""
    count, micro_batch = sizes
    size = MediaSize(32, 32)
    learner = make_learner(family, name, mode, size)
    samples = roll_out(learner, conditions, count)
    plain, batches = Plain(learner, family, size), plain_batches(family, samples, micro_batch)

    def by_hand(draw: Draw) -> float:
        if name == "flow-grpo":
            return plain_flow_grpo(plain, batches, count)
        return plain_diffusion_nft(plain, batches, count, draw)

    norms = by_hand(draw_as_ours), ours(learner, samples, micro_batch)
    console.print(f"{name}, {mode}: gradient norms {norms[0]:.6g} (plain) and {norms[1]:.6g} (ours)")
    if abs(norms[0] / norms[1] - 1) > 1e-3:
        raise SystemExit("the two loops do not train the same: nothing is compared")
    seconds = take_turns(
        {"plain": lambda: by_hand(draw_again), "ours": lambda: ours(learner, samples, micro_batch)},
        rounds,
        family.device,
        clock,
    )
    case = {"algorithm": name, "mode": mode, "samples": f"{count} in {micro_batch}s"}
    return Row(case, seconds, {"ours / plain": ratio(seconds["ours"], seconds["plain"])})


def plain_batches(family: QwenImage, samples: Sequence[TrainingSample], size: int) -> list[PlainBatch]:
    """The samples stacked."""
    return [
        PlainBatch(
            stack(samples[i : i + size], None, family.device, first_update=True),
            family.collate([sample.condition for sample in samples[i : i + size]]),
        )
        for i in range(0, len(samples), size)
    ]


def main(
    pipeline: Annotated[str, typer.Option(help="Directory or hub id; 32 x 32 pictures.")] = str(PIPELINE_DIR),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    algorithm: Annotated[list[str], typer.Option(help="Repeatable.")] = ["flow-grpo", "diffusion-nft"],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="lora or full; repeatable.")] = ["lora", "full"],  # noqa: B006
    samples: Annotated[int, typer.Option(help="Of an optimizer step.")] = 32,
    micro_batch: Annotated[int, typer.Option(help="Of a forward and backward.")] = 16,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 9,
    clock: Annotated[Clock, typer.Option(help=CLOCK_HELP)] = Clock.WALL,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Time the learner's update and a plain loop's, taking turns."""
    where = torch.device(device)
    prepare_process(where, deterministic=False)  # as a run does, for both sides
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    console = wide_console()
    with tempfile.TemporaryDirectory() as cache:
        family = QwenImage.load(pipeline, device=where, dtype=torch.float32, embeddings_cache=Path(cache))
        conditions = family.encode(PROMPTS)
    family.free_text_encoder()
    rows = [
        measure(
            family,
            conditions,
            name,
            "lora" if kind == "lora" else "full",
            (samples, micro_batch),
            repeats,
            clock,
            console,
        )
        for name in algorithm
        for kind in mode
    ]
    title = f"Training step, {TIMESTEPS} timesteps a sample, {clock} time"
    settings = {"pipeline": Path(pipeline).name, "timesteps": TIMESTEPS, "rank": RANK, "clock": clock}
    report = Report(title, where, settings, rows, "sample", [samples] * len(rows))
    report.show(console)
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
