"""The pipeline in the simulator: four published models on 16 and 32 H100, parts alone and one after another.

Beside each mode stand two ceilings of its throughput over the disaggregated synchronous one. With G the
seconds that the GPUs that only roll out take for all samples, and T those of the learner, one is
(G + T)/max(G, T), as published: two phases overlap perfectly, and nothing else takes time. The other is the
mode's own, if rollouts, training and turns alone took time: T is shorter with several timesteps a pass,
trainers may roll out and turn, at best once in two iterations where rollouts begin early. ``colocated``: all
GPUs roll out, then all train. ``--resident``: a GPU turns from one to the other at no cost, else at the
profile's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import ceil, inf

from rich.console import Console
from rich.table import Table

from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.types import Phase
from spotlight_plan.compare import SimulationOutcome, SimulationTask, run_tasks
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import PipelinePart, strategy_named
from spotlight_plan.scenarios.strategy_scenario import scenario_of

MODELS = {
    "HunyuanVideo": "pipeline-hunyuanvideo",
    "Wan2.1": "pipeline-wan",
    "FLUX.1": "pipeline-flux",
    "Qwen-Image": "pipeline-qwen-image",
}
ITERATIONS = 5
COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
ALL_ON = "gap+tsp+tag+tcss"
MODES = {
    COLOCATED: "all_on_demand",
    DISAGGREGATED: DISAGGREGATED,
    **{
        f"+{parts}": f"{DISAGGREGATED}+{parts}"
        for parts in (
            "gap",
            "gap+tsp",
            "gap+tsp+tag",
            ALL_ON,
            f"{ALL_ON}+exploration",
            "slices",
            "tsp",
            "tag",
            "tcss",
            "exploration",
            "gap+tsp+steal",
            "gap+tsp+steal+tcss",
        )
    },
}
"""Strategies by the name in the table: one part after the other, each alone, and stealing without bound."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained on how many GPUs.

    Attributes:
        training: GPUs that train where not all do; a multiple of 4, as ``gpus``.
        fraction: of the denoising steps that are trained.
        resident: GPUs that do both turn at no cost.
    """

    model: str
    gpus: int
    training: int
    steps: int
    fraction: float
    resident: bool

    def prepared(self) -> Prepared:
        """The scenario of it."""
        overrides = [
            f"cluster.reserved.nodes={self.training // 4}",
            f"cluster.spot.nodes={(self.gpus - self.training) // 4}",
            f"workload.steps={self.steps}",
            f"workload.trained_timesteps={round(self.fraction * self.steps)}",
            f"workload.resident={str(self.resident).lower()}",
            f"run.iterations={ITERATIONS}",
            "run.until_h=10000",
        ]
        return prepare(load_scenario(MODELS[self.model], overrides), tuple(MODES.values()), datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class Row:
    """One mode in one setting.

    Attributes:
        samples_per_s: trained, without the first iteration.
        over_colocated, over_disaggregated: throughput divided by theirs, both synchronous.
        published: ceiling of ``over_disaggregated``: (G + T)/max(G, T).
        of_published: what is reached of it: above 1 where trainers roll out, or T is shorter.
        ceiling: the mode's own.
        of_ceiling: what is reached of it.
        filled_gpu_h: GPU-hours of all iterations by what filled them.
    """

    mode: str
    samples_per_s: float
    over_colocated: float
    over_disaggregated: float
    published: float
    of_published: float
    ceiling: float
    of_ceiling: float
    idle_share: float
    filled_gpu_h: dict[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What an iteration is made of, as a strategy has it.

    Attributes:
        generation_gpu_s: GPU-seconds of its rollouts.
        training_s: of the learner, all ranks together.
        turn_s: of a GPU, from training to rollouts or back.
        ranks: GPUs that train; ``apart``: that only roll out; ``rolling``: that roll out.
    """

    generation_gpu_s: float
    training_s: float
    turn_s: float
    ranks: int
    apart: int
    rolling: int

    def synchronous_s(self) -> float:
        """Seconds of all rollouts, and then all training."""
        alone = self.generation_gpu_s / self.apart if self.apart else inf
        turns_s = 2 * self.turn_s
        helped = max(turns_s, (self.generation_gpu_s + turns_s * self.ranks) / self.rolling)
        return min(alone, helped if self.rolling > self.apart else inf) + self.training_s

    def overlapping_s(self, turns: float) -> float:
        """Seconds of an iteration in which both overlap, with so many turns of each GPU that does both.

        Where rollouts begin early, trainers may help every other iteration: one turn each on average. Helping
        more seldom still could beat that, as far as samples may be made in advance.
        """
        alone = max(self.training_s, self.generation_gpu_s / self.apart)
        if self.rolling == self.apart:
            return alone
        busy_s = self.training_s + turns * self.turn_s
        return min(
            alone, max(busy_s, (self.generation_gpu_s + busy_s * self.ranks) / (self.apart + self.ranks))
        )


def work_of(prepared: Prepared, name: str) -> Work:
    """An iteration of a strategy."""
    strategy = strategy_named(name)
    scenario = scenario_of(prepared, strategy)
    costs, plan, file = scenario.costs, scenario.plan, prepared.file
    nodes = [event.node for _, event in scenario.nodes if isinstance(event, NodeJoined)]
    gpu, pixels, samples = file.cluster.reserved.gpu_type, file.pixels, file.samples
    lease = costs.lease_size(gpu, pixels, 1)
    lease_s = plan.rollout_steps * costs.denoise_step_s(gpu, pixels, lease, 1)
    generation_gpu_s = samples * (lease_s + costs.decode_s(gpu, pixels, lease)) / lease
    batches = ceil(samples / plan.micro_batch_size)
    training_s = batches * costs.train_s(gpu, pixels, plan.micro_batch_size, plan.ranks)
    return Work(
        generation_gpu_s,
        training_s,
        costs.switch_s(),
        plan.ranks,
        apart=sum(node.gpus for node in nodes if node.rolls_out and not node.trains),
        rolling=sum(node.gpus for node in nodes if node.rolls_out),
    )


def shortest_s(prepared: Prepared, name: str) -> float:
    """Seconds of an iteration of nothing but rollouts, training and turns, all overlaps perfect."""
    parts, work = strategy_named(name).parts, work_of(prepared, name)
    if not parts & {PipelinePart.GAP, PipelinePart.SLICES, PipelinePart.TCSS}:
        return work.synchronous_s()
    return work.overlapping_s(turns=1 if PipelinePart.TCSS in parts else 2)


def rows_of(prepared: Prepared, outcomes: dict[str, SimulationOutcome]) -> list[Row]:
    """All modes of a setting."""
    synchronous_s = shortest_s(prepared, MODES[DISAGGREGATED])
    published = synchronous_s / work_of(prepared, MODES[DISAGGREGATED]).overlapping_s(turns=0)
    rows = []
    for mode, outcome in outcomes.items():
        over = outcomes[DISAGGREGATED].iteration_s / outcome.iteration_s
        least_s = shortest_s(prepared, MODES[mode])
        rows.append(
            Row(
                mode=mode,
                samples_per_s=prepared.file.samples / outcome.iteration_s,
                over_colocated=outcomes[COLOCATED].iteration_s / outcome.iteration_s,
                over_disaggregated=over,
                published=published,
                of_published=over / published,
                ceiling=synchronous_s / least_s,
                of_ceiling=least_s / outcome.iteration_s,
                idle_share=outcome.seconds([Phase.IDLE]) / outcome.total_s,
                filled_gpu_h={filler.value: s / 3600 for filler, s in outcome.filled_s.items()},
            )
        )
    return rows


def measure(setting: Setting, jobs: int) -> list[Row]:
    """Simulate all modes of a setting. Raises SystemExit if one does not come to its end."""
    prepared = setting.prepared()
    compared = run_tasks([SimulationTask(prepared, name) for name in MODES.values()], jobs)
    outcomes = {mode: one.outcome for mode, one in zip(MODES, compared, strict=True)}
    for mode, outcome in outcomes.items():
        if outcome.problem is not None:
            raise SystemExit(f"{setting}, {mode}: {outcome.problem}")
    return rows_of(prepared, outcomes)


def run_simulator(settings: Sequence[Setting], jobs: int) -> list[dict[str, object]]:
    """Measure and show every setting; returns all figures, JSON-able."""
    found: list[dict[str, object]] = []
    for setting in settings:
        rows = measure(setting, jobs)
        show(setting, rows)
        found.append(asdict(setting) | {"modes": [asdict(row) for row in rows]})
    return found


def show(setting: Setting, rows: Sequence[Row]) -> None:
    """Print a table."""
    turns = "at no cost" if setting.resident else "at the profile's cost"
    title = (
        f"{setting.model}, {setting.training} + {setting.gpus - setting.training} H100, "
        f"{setting.steps} steps, {setting.fraction:g} of them trained, GPUs turn {turns}"
    )
    table = Table(title=title)
    table.add_column("mode", no_wrap=True)
    for column in (
        "samples/s",
        "x colocated",
        "x disaggregated",
        "(G+T)/max",
        "of it",
        "ceiling",
        "of it",
        "idle",
        "by trainers",
        "next",
        "previews",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        filled = (row.filled_gpu_h.get(name) for name in ("trainers", "next", "exploration"))
        table.add_row(
            row.mode,
            f"{row.samples_per_s:.3g}",
            f"{row.over_colocated:.2f}",
            f"{row.over_disaggregated:.2f}",
            f"{row.published:.2f}",
            f"{row.of_published:.0%}",
            f"{row.ceiling:.2f}",
            f"{row.of_ceiling:.0%}",
            f"{row.idle_share:.0%}",
            *("" if hours is None else f"{hours:.2f} h" for hours in filled),
        )
    console = Console()
    (console if console.is_terminal else Console(width=170)).print(table)
