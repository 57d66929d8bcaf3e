"""What the exploration benchmark compares, and how large everything is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks._record import Tree
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import PreviewTime

CONDITIONS: Mapping[str, PreviewTime | None] = {
    "none": None,
    "critical_path": "critical_path",
    "idle": "idle",
}
"""How curves are made, and where previews are made."""
STRATEGY = {"none": "spot_rollout_only", "critical_path": "critical_path", "idle": "spotlight"}
"""What the simulator calls them."""
REWARD, KINDS = "reward", ("graded", "strict")
"""What is trained on, and what curves are of: its held-out mean, and the share that meets a prompt wholly."""
SUCCESS = ((0.0, 1.0), (0.0, 0.25), (0.25, 0.75), (0.75, 1.0))
"""Shares of a prompt's pictures that succeed: all prompts, hard ones, those between, easy ones."""
SHARES = (0.5, 0.75, 1.0)
"""Of the iterations: the scores that runs without exploration have then are those to be reached."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, as the file says it.

    Attributes:
        warmup: iterations of training before pools are made.
        stale: ages of weights, in iterations.
        steps: of pools' previews, besides those of a rollout.
        pool: seeds of a pool's prompt; counts of seeds up to it are compared.
        uptime_min: of a spot slot, on the average; 0: they stay.
    """

    iterations: int
    prompts: int
    group_size: int
    rollout_steps: int
    learning_rate: float
    evaluate_every: int
    evaluation_images: int
    seeds_per_prompt: int
    preview_steps: int
    policy: str
    warmup: int
    stale: tuple[int, ...]
    steps: tuple[int, ...]
    pool: int
    reserved: int
    spot: int
    uptime_min: float
    overrides: tuple[str, ...]

    def config(self, seed: int, iterations: int) -> RunConfig:
        """A run's configuration. Raises ConfigError."""
        return load_config(
            None,
            [
                f"run_seed={seed}",
                f"iterations={iterations}",
                f"rollout.prompts_per_iteration={self.prompts}",
                f"rollout.group_size={self.group_size}",
                f"rollout.steps={self.rollout_steps}",
                f"evaluation.steps={self.rollout_steps}",
                f"learner.learning_rate={self.learning_rate}",
                # It stays: a rate that falls with iterations would favour whoever is late.
                "learner.decay_iterations=null",
                f"learner.warmup_steps={min(3, self.iterations // 4)}",
                f"learner.micro_batch_size={self.prompts * self.group_size}",
                f"evaluation.every={self.evaluate_every}",
                f"evaluation.images_per_prompt={self.evaluation_images}",
                "evaluation.grid_images=1",
                f"exploration={{seeds_per_prompt: {self.seeds_per_prompt}, steps: {self.preview_steps}, "
                f"policy: {self.policy}}}",
                *self.overrides,
            ],
        )

    def as_json(self) -> Tree:
        """For the file."""
        tree: Tree = json.loads(json.dumps(asdict(self)))  # lists for tuples, as in the file
        return tree
