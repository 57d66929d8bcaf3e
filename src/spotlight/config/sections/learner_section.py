"""Configuration of the policy update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.requires import SET, UNSET, Computed, Requires, That, other_than
from spotlight.config.section import Section
from spotlight_rewards.base.errors import Problem
from spotlight_rewards.base.strict_section import COURSE, STATE, WORK

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


UpdateSplit = Literal["groups", "shuffled", "every_group"]


class LoraConfig(Section):
    """Low-rank adapters (peft)."""

    rank: PositiveInt = 32
    """Inner dimension."""
    alpha: PositiveFloat = 64.0
    """Scale: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Linear layers to adapt, by the ends of their names, with ``*`` for any one part, e.g. ``to_q`` or
    ``single_transformer_blocks.*.proj_out``; default: the family's attention and MLP layers.
    """
    init: Literal["uniform", "gaussian"] = "uniform"
    """Initial values of A (B starts at zero): uniform within 1 / sqrt(inputs), peft's default, or normal with
    standard deviation 1 / rank.
    """


class EmaConfig(Section):
    """Exponential moving average of the policy: decay min((1 + n)/(10 + n), cap)."""

    cap: Annotated[float, Field(ge=0, lt=1), COURSE] = 0.9
    """Largest decay."""
    every: Annotated[PositiveInt, COURSE] = 8
    """Optimizer steps between two updates of the average."""

    def decay(self, steps: int) -> float | None:
        """Decay of the update after optimizer step ``steps`` (the first is 1); None: no update then."""
        return None if steps % self.every else min((1 + steps) / (10 + steps), self.cap)


def _batch_problems(run: RunConfig) -> Iterator[Problem]:
    # Inline, the command knows the number of ranks, not the configuration: it is checked again then.
    ranks = run.fleet.learner_ranks if run.fleet.driver == "ray" else 1
    yield from batch_problems(run, ranks)


def _schedules(run: RunConfig) -> bool:
    follows = run.algorithm.uses_old_policy and not run.algorithm.old_policy_starts_batch
    return bool(run.learner.warmup_steps or run.learner.decay_iterations or follows)


class LearnerConfig(Section):
    """How the policy is updated."""

    mode: Annotated[Literal["lora", "full"], STATE] = "lora"
    """Train adapters, or every weight of the DiT."""
    lora: Annotated[LoraConfig, STATE] = LoraConfig()
    """Shape of the adapters. Unused by ``mode: full``."""
    learning_rate: Annotated[PositiveFloat, COURSE] = 3e-4
    """AdamW's learning rate, after warm-up."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], COURSE
    ] = (0.9, 0.999)
    """AdamW's betas."""
    epsilon: Annotated[PositiveFloat, COURSE] = 1e-8
    """AdamW's epsilon; the gradients' RMS is logged beside it, because mean-reduced log-probs can make
    gradients smaller than it.
    """
    weight_decay: Annotated[float, Field(ge=0), COURSE] = 1e-4
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Field(ge=0), COURSE] = 0
    """Optimizer steps of linear warm-up."""
    decay_iterations: Annotated[PositiveInt | None, COURSE] = None
    """After warm-up, cosine decay of the learning rate to 0 at this iteration; default: constant."""
    schedule_samples: Annotated[PositiveInt | None, COURSE] = None
    """Schedules (warm-up and decay of the learning rate, the old policy's decay) advance by trained samples:
    this many count as one iteration. Default: by iterations and optimizer steps, however few samples these
    train.
    """
    max_grad_norm: Annotated[PositiveFloat, COURSE] = 1.0
    """Gradients are clipped to this norm."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per iteration; its samples are divided among them, each in exactly one."""
    update_split: UpdateSplit = "groups"
    """How samples are divided among the optimizer steps. ``groups``: each step trains whole groups;
    ``shuffled``: samples at random; ``every_group``: an equal part of each group. Advantages are always over
    whole groups.
    """
    micro_batch_size: Annotated[PositiveInt, WORK] = 64
    """Samples per forward/backward of one rank; limited by memory. Gradients accumulate."""
    ema: EmaConfig | None = None
    """Maintain a moving average of the policy."""
    shard: Annotated[Literal["none", "node", "all"], WORK] = "node"
    """How several ranks share the DiT (FSDP2). ``node``: among the ranks of each node, so that only gradients
    cross the network; ``all``: among all ranks, for models too large for one node; ``none``: every rank
    holds all of it, the fastest if it fits.
    """
    keep_gathered: Annotated[bool | Literal["auto"], WORK] = "auto"
    """Where ranks share the DiT and roll out with it (torchrun), gather its parameters once per lease instead
    of in every forward. ``auto``: if they fit into each GPU beside a denoising forward, which the first
    rollouts measure; never on CPUs.
    """
    recompute: Annotated[
        Literal["none", "elementwise", "blocks", "auto"] | Annotated[int, Field(ge=2)], WORK
    ] = "none"
    """What the backward pass recomputes instead of keeping. ``elementwise``: all but matrix products and
    attention, about half the memory for little time; ``blocks``: everything, the least memory for about a
    third more time; a number n: all of every n-th block, nothing of the others; ``auto``: as little as fits
    into memory, measured the first time a shape occurs. Gradients are equal. If a pass of ``auto`` still runs
    out of memory, a single rank repeats it with more recomputation. Several ranks end, since they wait for
    each other within a pass: leave them more room with ``pass_memory_gib``.
    """
    timesteps_per_pass: Annotated[PositiveInt | Literal["auto"], WORK] = 1
    """Maximum number of training timesteps of a micro-batch per forward and backward. Activations grow in
    proportion; sharded weights are gathered once for all of them. ``auto``: as many as fit into memory,
    measured the first time a shape occurs. If a pass runs out of memory, a single rank takes fewer; several
    ranks end.
    """
    pass_memory_gib: Annotated[PositiveFloat | None, WORK] = None
    """With ``timesteps_per_pass: auto`` or ``recompute: auto``, memory that a pass may use; default: all
    that is free.
    """
    autocast: Literal["none", "bfloat16"] = "none"
    """Precision of the DiT's matrix products; sampler maths and losses stay float32. With ``model.dtype:
    bfloat16`` adapters are applied as bfloat16 copies, without autocast; their weights stay float32.
    """

    @property
    def pass_memory_bytes(self) -> int | None:
        return None if self.pass_memory_gib is None else int(self.pass_memory_gib * 2**30)

    @property
    def decay_steps(self) -> int | None:
        """``decay_iterations`` in optimizer steps."""
        return None if self.decay_iterations is None else self.decay_iterations * self.updates_per_batch

    def scheduled(self, steps: int, batches: int, samples: int) -> tuple[float, float]:
        """How far schedules have advanced, in optimizer steps and in batches.

        Args:
            steps, batches, samples: trained so far.
        """
        if self.schedule_samples is None:
            return steps, batches
        done = samples / self.schedule_samples
        return done * self.updates_per_batch, done

    def learning_rate_at(self, step: float) -> float:
        """Learning rate of the next optimizer step after ``step`` steps, as :meth:`scheduled` counts them."""
        if step < self.warmup_steps:
            # By samples, a step may be a fraction: the last one would exceed the whole.
            return self.learning_rate * min((step + 1) / self.warmup_steps, 1.0)
        if self.decay_steps is None:
            return self.learning_rate
        falling = self.decay_steps - self.warmup_steps
        done = min((step - self.warmup_steps) / falling, 1.0)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2

    requires = (
        Computed("learner.updates_per_batch", "a divisor of rollout.prompts_per_iteration, or of the samples "
                 "of an iteration, as learner.update_split divides them", _batch_problems),
        Requires("model.dtype", {"learner.mode": "full"}, "float32",
                 "bfloat16 swallows small updates: set model.dtype=float32 (and learner.autocast=bfloat16 "
                 "for speed), or learner.mode=lora."),
        Requires("learner.update_split", {"learner.updates_per_batch": 1}, "groups",
                 "One update trains all samples: leave one of the two keys out."),
        Requires("learner.update_split", {"pipeline.axis": other_than("none")}, "groups",
                 "Which samples an update trains is known only once all are complete: leave one of the two "
                 "keys out."),
        Requires("learner.update_split",
                 That("with algorithm.name={algorithm.name}, whose loss compares the samples of a group",
                      lambda run: run.algorithm.compares_groups), "groups",
                 "Its loss compares the samples of a group: leave one of the two keys out."),
        Requires("iterations", {},
                 That("at most learner.decay_iterations={learner.decay_iterations}, where the learning rate "
                      "is 0 after {decays_until} iterations",
                      lambda run: run.iterations <= (run.decays_until or math.inf) * (1 + 1e-9)),
                 "Raise learner.decay_iterations with it (for a new run: it changes every step's learning "
                 "rate)."),
        Requires("learner.warmup_steps", {"learner.decay_iterations": SET},
                 That("fewer than the {learner.decay_steps} optimizer steps of "
                      "learner.decay_iterations={learner.decay_iterations}",
                      lambda run: run.learner.warmup_steps < (run.learner.decay_steps or math.inf)),
                 "Shorten the warm-up, or lengthen the decay."),
        Requires("learner.schedule_samples",
                 That("where nothing is scheduled", lambda run: not _schedules(run)), UNSET,
                 "It counts learner.warmup_steps, learner.decay_iterations and an old policy's decay: set "
                 "one, or leave it out."),
        *(Requires("learner.keep_gathered", where, ("auto", False),
                   "Only ranks that share the model and roll out themselves gather it. Leave it out.")
          for where in ({"learner.shard": "none"}, {"fleet.driver": "ray"})),
        Requires("model.compile", {"learner.recompute": ("elementwise", "auto")}, "none",
                 "Compiled code hides matrix products: set learner.recompute=blocks, or leave model.compile "
                 "out."),
        Requires("learner.pass_memory_gib",
                 {"learner.timesteps_per_pass": other_than("auto"), "learner.recompute": other_than("auto")},
                 UNSET, "Only learner.timesteps_per_pass=auto and learner.recompute=auto look at memory: set "
                 "one of them, or leave the budget out."),
    )  # fmt: skip


def batch_problems(run: RunConfig, ranks: int) -> Iterator[Problem]:
    """Batch sizes that do not divide, with the nearest that do.

    Args:
        ranks: processes that share the work (``--ranks``, ``fleet.learner_ranks``).
    """
    learner, prompts, group = run.learner, run.rollout.prompts_per_iteration, run.trained_per_prompt
    updates, micro = learner.updates_per_batch, learner.micro_batch_size
    divided, key = run.trained_samples, "the samples of an iteration"
    if learner.update_split == "groups":
        divided, key = prompts, "rollout.prompts_per_iteration"
    if divided % updates:
        more = -(-prompts // updates) * updates
        whole = " (groups are not cut)" if learner.update_split == "groups" else ""
        yield Problem(
            "learner.updates_per_batch", str(updates), f"a divisor of {key} = {divided}{whole}",
            f"Nearest: {divisors_near(divided, updates)}; or rollout.prompts_per_iteration={more}.",
        )  # fmt: skip
        return
    update_samples = run.trained_samples // updates
    if update_samples % ranks:
        yield Problem(
            run.trained_per_prompt_key, str(group),
            f"samples of an update ({update_samples}) divisible by the {ranks} ranks",
            f"Use {divisors_near(update_samples, ranks)} ranks (--ranks; on Ray fleet.learner_ranks), "
            f"or {run.trained_per_prompt_key}={-(-group // ranks) * ranks}.",
        )  # fmt: skip
        return
    share = update_samples // ranks
    if share % micro and micro < share:
        yield Problem(
            "learner.micro_batch_size", str(micro),
            f"a divisor of the {share} samples that a rank trains in an update "
            f"({prompts} prompts x {group} samples / {updates} updates / {ranks} ranks)",
            f"Nearest: {divisors_near(share, micro)}.",
        )  # fmt: skip


def divisors_near(number: int, wanted: int) -> str:
    """The divisors of ``number`` nearest to ``wanted``, as text ("4 or 6")."""
    below = max((d for d in range(1, min(number, wanted) + 1) if number % d == 0), default=1)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), number)
    return str(below) if below == above else f"{below} or {above}"
