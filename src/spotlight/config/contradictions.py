"""Checks between fields: batch arithmetic, and settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from spotlight.config.errors import Problem
from spotlight.config.exploration_contradictions import exploration_problems
from spotlight.config.fleet_contradictions import fleet_problems
from spotlight.config.pipeline_contradictions import pipeline_problems
from spotlight.config.schema import RewardConfig, RunConfig

TOTAL = "reward"
"""Name of the weighted sum among the curves of a sample."""


def divisors_near(number: int, wanted: int) -> str:
    """The nearest divisors of ``number`` around ``wanted``, as text ("4 or 6")."""
    below = max((d for d in range(1, min(number, wanted) + 1) if number % d == 0), default=1)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), number)
    return str(below) if below == above else f"{below} or {above}"


def find_problems(config: RunConfig) -> list[Problem]:
    """Every contradiction in an otherwise well-typed configuration."""
    return [
        *_sampler(config),
        *_window(config),
        *batch_problems(config, config.fleet.learner_ranks if config.fleet.driver == "ray" else 1),
        *_weights(config),
        *_learning_rate(config),
        *_passes(config),
        *_evaluation(config),
        *_rewards(config),
        *exploration_problems(config),
        *pipeline_problems(config),
        *fleet_problems(config.fleet, trainers_generate=config.pipeline.trainers_generate),
    ]


def _sampler(config: RunConfig) -> Iterator[Problem]:
    sampler, algorithm = config.rollout.sampler, config.algorithm
    if algorithm.learns_from_clean_samples:
        if sampler != "ode":
            yield Problem(
                "rollout.sampler", repr(sampler), f"'ode' with algorithm.name={algorithm.name}",
                "It learns from clean samples, which SDE noise makes worse: set rollout.sampler=ode.",
            )  # fmt: skip
        return
    if sampler == "cps" and config.rollout.noise_level > 1:
        yield Problem(
            "rollout.noise_level", str(config.rollout.noise_level), "at most 1 with rollout.sampler=cps",
            "At 1 all noise of a step is fresh; 0.8 is usual.",
        )  # fmt: skip
    if sampler == "ode":
        yield Problem(
            "rollout.sampler", "'ode'", f"a stochastic sampler with algorithm.name={algorithm.name}",
            "Set rollout.sampler to flow-sde, cps or dance: an ODE step has no log-probability.",
        )  # fmt: skip
    if config.rollout.noise_level == 0:
        yield Problem(
            "rollout.noise_level", "0", f"above 0 with algorithm.name={algorithm.name}",
            "Without noise a step has no log-probability; Flow-GRPO uses 0.7.",
        )  # fmt: skip


def _weights(config: RunConfig) -> Iterator[Problem]:
    if config.learner.mode == "full" and config.model.dtype != "float32":
        yield Problem(
            "model.dtype", repr(config.model.dtype), "'float32' with learner.mode=full",
            "bfloat16 swallows small updates: set model.dtype=float32 (and learner.autocast=bfloat16 for "
            "speed), or learner.mode=lora.",
        )  # fmt: skip


def _learning_rate(config: RunConfig) -> Iterator[Problem]:
    learner = config.learner
    if learner.decay_iterations is None:
        return
    if config.iterations > learner.decay_iterations:
        yield Problem(
            "iterations", str(config.iterations),
            f"at most learner.decay_iterations={learner.decay_iterations}, where the learning rate is 0",
            "Raise learner.decay_iterations with it (for a new run: it changes every step's learning rate).",
        )  # fmt: skip
    steps = learner.decay_iterations * learner.updates_per_batch
    if learner.warmup_steps >= steps:
        yield Problem(
            "learner.warmup_steps", str(learner.warmup_steps),
            f"fewer than the {steps} optimizer steps of learner.decay_iterations={learner.decay_iterations}",
            "Shorten the warm-up, or lengthen the decay.",
        )  # fmt: skip


def _passes(config: RunConfig) -> Iterator[Problem]:
    learner = config.learner
    if learner.pass_memory_gib is not None and learner.timesteps_per_pass != "auto":
        yield Problem(
            "learner.pass_memory_gib", f"{learner.pass_memory_gib:g}",
            f"not set with learner.timesteps_per_pass={learner.timesteps_per_pass}",
            "Only learner.timesteps_per_pass=auto looks at memory: set that, or leave the budget out.",
        )  # fmt: skip


def kept_steps(config: RunConfig) -> int:
    """Stochastic (trainable) steps of a rollout; 0 with the ODE sampler."""
    if config.rollout.sampler == "ode":
        return 0
    window = config.rollout.sde_window
    return config.rollout.steps - 1 if window.kind == "all" else window.size


def trained_timesteps(config: RunConfig) -> int:
    """Forwards and backwards of the loss that a sample costs (guidance aside)."""
    return config.algorithm.train_timesteps or kept_steps(config)


def _default_high(config: RunConfig) -> int:
    """What ``spotlight.diffusion.schedule`` takes when ``rollout.sde_window.high`` is not set."""
    window, steps = config.rollout.sde_window, config.rollout.steps
    if window.kind == "random":
        return min(max(window.low + window.size, steps // 2), steps - 1)
    return steps - 1


def _window(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.sampler == "ode":
        return
    window, last = config.rollout.sde_window, config.rollout.steps - 1
    if window.kind != "all":
        high = window.high if window.high is not None else _default_high(config)
        if high > last:
            yield Problem(
                "rollout.sde_window.high", str(high), f"at most rollout.steps - 1 = {last}",
                "The last step is never stochastic: it would leave noise in the picture.",
            )  # fmt: skip
        if window.low + window.size > high:
            yield Problem(
                "rollout.sde_window.size", str(window.size), f"at most high - low = {high - window.low}",
                "Widen [low, high) or take fewer steps.",
            )  # fmt: skip
    wanted = config.algorithm.train_timesteps
    if wanted is not None and wanted > kept_steps(config):
        yield Problem(
            "algorithm.train_timesteps", str(wanted),
            f"at most {kept_steps(config)}, the stochastic steps of a rollout",
            "Lower it, or widen rollout.sde_window.",
        )  # fmt: skip


def batch_problems(config: RunConfig, ranks: int = 1) -> Iterator[Problem]:
    """What does not divide, with the nearest values that do.

    Args:
        ranks: processes that share the work (``fleet.learner_ranks``, ``torchrun --nproc-per-node``).
    """
    prompts, group = config.rollout.prompts_per_iteration, config.rollout.group_size
    updates, micro = config.learner.updates_per_batch, config.learner.micro_batch_size
    if prompts % updates:
        more = -(-prompts // updates) * updates
        yield Problem(
            "learner.updates_per_batch", str(updates),
            f"a divisor of rollout.prompts_per_iteration = {prompts} (groups are not cut)",
            f"Nearest: {divisors_near(prompts, updates)}; or rollout.prompts_per_iteration={more}.",
        )  # fmt: skip
        return
    update_samples = prompts // updates * group
    if update_samples % ranks:
        yield Problem(
            "rollout.group_size", str(group),
            f"samples of an update ({update_samples}) divisible by the {ranks} ranks",
            f"Take {divisors_near(update_samples, ranks)} ranks (fleet.learner_ranks, or torchrun's), "
            f"or rollout.group_size={-(-group // ranks) * ranks}.",
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


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    weights = config.evaluation.weights
    if weights == "ema" and config.learner.ema is None:
        yield Problem(
            "evaluation.weights", "'ema'", "'policy', while learner.ema is not set",
            "Set learner.ema.cap=0.9 or evaluate the policy.",
        )  # fmt: skip
    if weights == "old" and not config.algorithm.uses_old_policy:
        yield Problem(
            "evaluation.weights", "'old'", f"'policy' or 'ema' with algorithm.name={config.algorithm.name}",
            "This algorithm keeps no old policy.",
        )  # fmt: skip
    if config.evaluation.grid_images > config.evaluation.images_per_prompt:
        yield Problem(
            "evaluation.grid_images", str(config.evaluation.grid_images),
            f"at most evaluation.images_per_prompt = {config.evaluation.images_per_prompt}",
            "Grids show evaluation images; lower it or evaluate more.",
        )  # fmt: skip


def curve_name(reward: RewardConfig) -> str:
    """What the reward's curves are called: its label, or the function that ``module:function`` names."""
    return reward.label or reward.name.rpartition(":")[2].rpartition(".")[2]


def _rewards(config: RunConfig) -> Iterator[Problem]:
    names = [curve_name(reward) for reward in config.rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("rewards", f"{name!r} twice", "each name once", "Add the weights, or give a label.")
    if all(reward.weight == 0 for reward in config.rewards):
        yield Problem("rewards", "only weights of 0", "at least one other weight", "Nothing would be learnt.")
    strict = config.evaluation.strict
    # What details a reward tells shows only when it has scored; which rewards there are is known.
    if strict is not None and strict.partition("/")[0] not in {TOTAL, *names}:
        yield Problem(
            "evaluation.strict", repr(strict), f"{TOTAL!r}, or a curve of {' or '.join(map(repr, names))}",
            f"Name a curve that the rewards make, such as {names[0]!r}, or leave the key out.",
        )  # fmt: skip
