"""What the learning benchmark compares: the tasks, and the ways to train on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from benchmarks._record import Tree
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import PreviewTime

BASELINE = "baseline"
_FORWARD, _POLICY = (1e-3, 2e-3, 4e-3), (1e-4, 3e-4, 1e-3)
_COUNTED = "rewards=[{name: shape-counter}, {name: shapes, weight: 0}]"
_DISTILLED = ("model.lora=testbed-four-steps", "learner.lora={rank: 8, alpha: 16}", "rollout.steps=4",
              "evaluation.steps=4")  # fmt: skip
"""The model distilled to four steps, which is trained and judged in four."""
_OVERLAP = (
    "fleet={driver: ray, spot: {nodes: 4}}", "algorithm.advantage={std: group}",
    "pipeline={axis: prompt, next_share: 0.5}",
)  # fmt: skip
"""Generation-axis pipeline and one-step asynchrony, as on a cluster."""
_WINDOW = 3
"""Stochastic steps of a rollout, somewhere in its first half; fewer where there are fewer."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is learnt.

    Attributes:
        overrides: of the demo.
        targets: strict scores that are to be reached, besides the baseline's last.
        reward_s: CPU seconds of its reward a picture, by ``benchmarks.ocr_readers``; None: the profile's.
        scorers: processes of the simulated cluster that score at once: ``rewards[].replicas``.
        writes: its model is the one that writes, which no network counts on and nobody has distilled.
    """

    overrides: tuple[str, ...]
    targets: tuple[float, ...] = ()
    reward_s: float | None = None
    scorers: int = 1
    writes: bool = False


_TEXT = (
    "model.path=testbed-text", "data={train: testbed-text, test: testbed-text}",
    "rollout.height=16", "rollout.width=56",
    "rewards=[{name: ocr-onnx, params: {find: false}}]",
    "evaluation.strict=ocr-onnx/exact", "evaluation.images_per_prompt=8",
)  # fmt: skip
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "counting": Task(("data.tags=[counting]",), (0.75, 0.8)),
        "placing": Task(("data.tags=[position, two_object]",)),
        "text": Task(_TEXT, reward_s=0.0129, scorers=2, writes=True),
    }
)
"""The demo's, a harder one where random seeds learn slowly, and words that PP-OCR reads."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train.

    Attributes:
        overrides: of the demo.
        rates: learning rates of which the best is taken, the middle one where none is looked for.
        generated: pictures per prompt, in groups of the baseline.
        trained: of them, in groups of the baseline; None: all.
        explores: where seeds are previewed: twice the group's number.
        stochastic: rollouts have steps with noise, whose probabilities are trained.
        overlaps: complete groups are trained while others are made, and half of the next iteration's are
            made before this one's update: what the simulator calls ``+gap+tcss``.
    """

    overrides: tuple[str, ...] = ()
    rates: tuple[float, float, float] = _FORWARD
    generated: int = 1
    trained: float | None = None
    explores: PreviewTime | None = None
    stochastic: bool = False
    overlaps: bool = False

    def suits(self, task: Task) -> bool:
        """Whether there is a model for both: a network that counts and few steps are of shapes alone."""
        return not (task.writes and {_COUNTED, _DISTILLED[0]} & {*self.overrides})


CASES: Mapping[str, Case] = MappingProxyType(
    {
        BASELINE: Case(),
        "subset": Case(trained=0.5),
        "wide-subset": Case(generated=2, trained=0.5),
        "wide-quarter": Case(generated=2, trained=0.25),
        "wide-subset+overlap": Case(_OVERLAP, generated=2, trained=0.5, overlaps=True),
        "few-steps": Case(_DISTILLED),
        "few-steps+wide-subset": Case(_DISTILLED, generated=2, trained=0.5),
        "random-half": Case(("algorithm.train_policy=random",), trained=0.5),
        "explored": Case(explores="critical_path"),
        "explored-idle": Case(explores="idle"),
        "subset+explored-idle": Case(trained=0.5, explores="idle"),
        "flow-grpo": Case(
            ("algorithm.name=flow-grpo-fast", "algorithm.clip_range=1e-5"), _POLICY, stochastic=True
        ),
        "grpo-guard": Case(("algorithm.name=grpo-guard",), _POLICY, stochastic=True),
        "flow-dppo": Case(("algorithm.name=flow-dppo",), _POLICY, stochastic=True),
        "awm": Case(("algorithm.name=awm",)),
        "v-grpo": Case(("algorithm.name=v-grpo",)),
        "dgpo": Case(("algorithm.name=dgpo",)),
        "diffusion-dpo": Case(("algorithm.name=diffusion-dpo",)),
        "rvm": Case(("algorithm.name=rvm",)),
        "ram": Case(("algorithm.name=ram",)),
        # By the gradient of a network, which the exact detector judges.
        "opsd": Case(("algorithm.name=opsd", _COUNTED)),
        "few-steps+counted": Case((*_DISTILLED, _COUNTED), (2e-3, 4e-3, 8e-3)),
        "few-steps+rvm+counted": Case(("algorithm.name=rvm", *_DISTILLED, _COUNTED)),
        "few-steps+opsd": Case(
            ("algorithm.name=opsd", "algorithm.query_steps=2", *_DISTILLED, _COUNTED), (1e-3, 3e-3, 6e-3)
        ),
        "refl": Case(("algorithm.name=refl", _COUNTED)),
    }
)
"""By name; the first is what all are compared with, unless another is named."""


@dataclass(frozen=True, slots=True)
class LearningSizes:
    """How large everything is, as the file says it.

    Attributes:
        reserved, spot: slots of the simulated cluster.
    """

    iterations: int
    prompts: int
    group_size: int
    rollout_steps: int
    evaluate_every: int
    evaluation_images: int
    reserved: int
    spot: int
    overrides: tuple[str, ...]

    def as_json(self) -> Tree:
        """For the file."""
        tree: Tree = json.loads(json.dumps(asdict(self)))  # lists for tuples, as in the file
        return tree

    def generated(self, case: Case) -> int:
        """Pictures of a prompt that are whole rollouts."""
        return case.generated * self.group_size

    def previews(self, case: Case) -> int:
        """Seeds of a prompt that are previewed, with all steps of a rollout."""
        return 2 * self.generated(case) if case.explores else 0

    def made(self, case: Case) -> int:
        """Pictures of a prompt that are denoised. On the critical path chosen previews are its rollouts."""
        again = 0 if case.explores == "critical_path" else self.generated(case)
        return again + self.previews(case)

    def trained(self, case: Case) -> int:
        """Pictures of a prompt that are trained."""
        return self.generated(case) if case.trained is None else max(2, round(case.trained * self.group_size))

    def config(self, task: str, case: Case, rate: float, seed: int) -> RunConfig:
        """A run's configuration. Raises ConfigError."""
        previewed = f"{{seeds_per_prompt: {self.previews(case)}, steps: {self.rollout_steps}}}"
        explores = [f"exploration={previewed}"] if case.explores else []
        high = min(5, self.rollout_steps - 1)
        window = f"{{kind: random, size: {min(_WINDOW, high)}, low: 0, high: {high}}}"
        noisy = ["rollout.sampler=cps", "rollout.noise_level=0.8", f"rollout.sde_window={window}",
                 "learner.epsilon=1e-15"]  # fmt: skip
        chooses = [] if case.trained is None else [f"algorithm.train_samples={self.trained(case)}"]
        return load_config(
            None,
            [
                f"run_seed={seed}",
                f"iterations={self.iterations}",
                f"rollout.prompts_per_iteration={self.prompts}",
                f"rollout.group_size={self.generated(case)}",
                f"rollout.steps={self.rollout_steps}",
                f"evaluation.steps={self.rollout_steps}",
                f"evaluation.every={self.evaluate_every}",
                f"evaluation.images_per_prompt={self.evaluation_images}",
                "evaluation.grid_images=1",
                f"learner.learning_rate={rate}",
                # By iterations as everywhere: who trains less in one learns as long.
                f"learner.decay_iterations={self.iterations}",
                f"learner.warmup_steps={min(5, self.iterations // 4)}",
                f"learner.micro_batch_size={_micro_batch(self.prompts * self.trained(case), case.overlaps)}",
                *(noisy if case.stochastic else []),
                *TASKS[task].overrides,
                *case.overrides,
                *chooses,
                *explores,
                *self.overrides,
            ],
        )


def _micro_batch(samples: int, overlaps: bool) -> int:
    """The largest share of an update's samples that is even and at most 64, the demo's; less than all of them
    where they are trained before the last is there."""
    return max(size for size in range(1, min(64, samples - overlaps) + 1) if samples % size == 0)
