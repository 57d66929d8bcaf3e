"""What cheaper previews cost and how well they rank: fewer steps, reused blocks, half precision.

    python -m benchmarks.cheap_previews --json cheap-previews.json

Rollouts of the testbed as it is shipped, and previews of the same seeds with the same weights: what a preview
misses it misses by its own shortcut. Prompt by prompt, all settings take turns; Kendall's tau (tau-b) is
within a prompt, between the rewards of its previews and of its whole rollouts. Seconds are those of denoising
and decoding, as this process computed them; rewards are not timed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.table import Table

from benchmarks._measure import CLOCK_HELP, Clock, machine, ratio, take_turns, wide_console, write_result
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.diffusion.noise import INITIAL, noise_batch
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.family import Condition, pack, unpack
from spotlight.models.media import MediaSize
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import Model, prepare_model
from spotlight.runtime.process import prepare_process
from spotlight.scheduler.policies.exploration.fidelity import hit_rate, kendall_tau
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import ScoredSample

SAMPLERS = {
    "ode": ("algorithm.name=diffusion-nft", "rollout.sampler=ode"),
    "flow-sde": ("algorithm.name=flow-grpo", "rollout.sampler=flow-sde"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """How previews are made.

    Attributes:
        step_cache: see :class:`spotlight.rollout.state.Recipe`.
        small: half as high and wide, from the rollout's initial noise averaged over 2 x 2 latents.
    """

    steps: int
    step_cache: int = 1
    half: bool = False
    small: bool = False

    def __str__(self) -> str:
        if self.small:
            return f"{self.steps} steps, half the size"
        known = [f"{self.steps} steps"]
        if self.step_cache > 1:
            known.append(f"step_cache {self.step_cache}")
        return ", ".join(known + ["bfloat16"] * self.half)

    def recipe(self, train: Recipe, rollout_steps: int) -> Recipe:
        """As ``exploration`` would make it."""
        half = torch.bfloat16 if self.half else None
        return train.preview(rollout_steps, step_cache=self.step_cache, autocast=half)


def settings_of(steps: int) -> list[Setting]:
    """Shortcuts one by one, and together."""
    fewer = sorted({max(2, round(share * steps)) for share in (0.4, 0.5, 0.6, 0.8)}, reverse=True)
    cached = [Setting(steps, every) for every in (2, 3, 5) if every <= steps]
    together = [Setting(n, 2) for n in fewer if n < steps][:1]
    halves = [Setting(steps, half=True), Setting(steps, 2, half=True)]
    halves.append(Setting(steps, small=True))
    return [*(Setting(n) for n in fewer if n < steps), *cached, *together, *halves]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one setting, prompt by prompt; None where all rewards are alike.

    Attributes:
        seconds: of one preview.
        whole_seconds: of one whole rollout in the same round.
        hits: mean share of the best and worst quarter found.
    """

    sampler: str
    setting: str
    seconds: Sequence[float]
    whole_seconds: Sequence[float]
    tau: Sequence[float | None]
    hits: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded model and what judges it."""

    config: RunConfig
    model: Model
    engine: Engine
    rewards: RewardPool
    prompts: Sequence[Prompt]
    conditions: Sequence[Condition]
    seeds: int

    def pictures(self, place: int, purpose: Purpose, setting: Setting) -> list[NDArray[np.uint8]]:
        """Of every seed of the prompt at ``place``."""
        rollouts = [
            Rollout(
                RolloutId(f"{place}-{member}"), purpose, 0, self.prompts[place].id, member,
                derive_seed(self.config.run_seed, "cheap", place, member), setting.steps, PolicyVersion(0),
            )
            for member in range(self.seeds)
        ]  # fmt: skip
        train = self.model.recipes[Purpose.TRAIN]
        whole = purpose is Purpose.TRAIN
        recipe = train if whole else setting.recipe(train, self.config.rollout.steps)
        if setting.small:
            size = MediaSize(recipe.size.height // 2, recipe.size.width // 2)
            whole_size, recipe = recipe.size, replace(recipe, size=size)
        states = self.engine.start(rollouts, [self.conditions[place]] * self.seeds, recipe)
        if setting.small:
            states = self.shrunk(states, whole_size)
        results = self.engine.run(self.model.family.transformer, states)
        assert all(isinstance(result, FinishedRollout) for result in results), "the testbed does not diverge"
        pictures = [result.image for result in results if isinstance(result, FinishedRollout)]
        return [picture.repeat(2, 0).repeat(2, 1) for picture in pictures] if setting.small else pictures

    def shrunk(self, states: Sequence[RolloutState], size: MediaSize) -> list[RolloutState]:
        """Small rollouts from the noise that their rollouts of ``size`` begin with.

        A mean of four independent normals has half their deviation. Packed latents only (Qwen-Image).
        """
        family = self.model.family
        assert isinstance(family, QwenImage), "other families lay their latents out otherwise"
        seeds = [state.rollout.seed for state in states]
        noise = noise_batch(seeds, [INITIAL] * len(seeds), family.latent_shape(size), family.device)
        whole = unpack(noise, family.dimensions.grid(size))
        small = pack(2 * torch.nn.functional.avg_pool2d(whole, 2))
        return [replace(state, latents=row) for state, row in zip(states, small, strict=True)]

    def scores(self, place: int, pictures: Sequence[NDArray[np.uint8]]) -> list[float]:
        """Rewards of pictures of one prompt."""
        prompt = self.prompts[place]
        batch = self.rewards.score(
            list(pictures), [prompt.text] * len(pictures), [prompt.metadata] * len(pictures)
        )
        assert all(isinstance(sample, ScoredSample) for sample in batch.samples), "a reward failed"
        return [s.curves()["reward"] for s in batch.samples if isinstance(s, ScoredSample)]


def measure(bench: Bench, sampler: str, settings: Sequence[Setting], clock: Clock) -> list[Figures]:
    """Every setting against whole rollouts; a round is a prompt, and a first one does not count."""
    whole = Setting(bench.config.rollout.steps)
    turns = {"whole": (Purpose.TRAIN, whole)} | {str(s): (Purpose.EXPLORE, s) for s in settings}
    pictures: dict[str, dict[int, list[NDArray[np.uint8]]]] = {name: {} for name in turns}
    places = {name: chain([0], range(len(bench.prompts))) for name in turns}

    def contestant(name: str) -> Callable[[], None]:
        def take_turn() -> None:
            place = next(places[name])
            pictures[name][place] = bench.pictures(place, *turns[name])

        return take_turn

    seconds = take_turns(
        {name: contestant(name) for name in turns}, len(bench.prompts), bench.model.family.device, clock
    )
    rewards = {name: [bench.scores(place, made[place]) for place in sorted(made)]
               for name, made in pictures.items()}  # fmt: skip
    return [
        Figures(
            sampler,
            name,
            [taken / bench.seeds for taken in seconds[name]],
            [taken / bench.seeds for taken in seconds["whole"]],
            [kendall_tau(*pair) for pair in zip(rewards[name], rewards["whole"], strict=True)],
            [_hits(*pair) for pair in zip(rewards[name], rewards["whole"], strict=True)],
        )
        for name in turns
    ]


def _hits(previews: Sequence[float], whole: Sequence[float]) -> float | None:
    if len(set(whole)) == 1:
        return None
    count = max(1, len(whole) // 4)
    return statistics.fmean(hit_rate(previews, whole, count, top=top) for top in (True, False))


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard error over the prompts that tell something."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return "-"
    return f"{statistics.fmean(known):.3f} ± {statistics.stdev(known) / math.sqrt(len(known)):.3f}"


def show(figures: Sequence[Figures], title: str) -> None:
    """Print the table."""
    table = Table(title=title, caption="mean ± standard error over prompts; seconds: median [95 % interval]")
    for column in ("sampler", "previews", "ms", "of a whole rollout", "Kendall's tau", "quarters hit"):
        table.add_column(column, justify="left" if column in ("sampler", "previews") else "right")
    for row in figures:
        table.add_row(
            row.sampler,
            row.setting,
            f"{1000 * statistics.median(row.seconds):.1f}",
            str(ratio(row.seconds, row.whole_seconds)),
            spread(row.tau),
            spread(row.hits),
        )
    wide_console().print(table)


def main(
    sampler: Annotated[list[str], typer.Option(help="ode, flow-sde; repeatable.")] = list(SAMPLERS),  # noqa: B006
    prompts: Annotated[int, typer.Option(help="Each is a round.")] = 6,
    seeds: Annotated[int, typer.Option(help="Previews of a prompt.")] = 24,
    steps: Annotated[int, typer.Option(help="Of a whole rollout.")] = 10,
    only: Annotated[str, typer.Option(help="Settings whose name has this in it, e.g. step_cache.")] = "",
    pipeline: Annotated[str, typer.Option(help="Directory, or testbed.")] = "testbed",
    clock: Annotated[Clock, typer.Option(help=CLOCK_HELP)] = Clock.CPU,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Cost and ranking of cheaper previews on the testbed."""
    device = torch.device("cpu")
    prepare_process(device, deterministic=False)
    figures: list[Figures] = []
    for name in sampler:
        with tempfile.TemporaryDirectory() as cache:
            overrides = [*SAMPLERS[name], f"rollout.steps={steps}", f"cache_dir={cache}"]
            overrides += ["data.train=testbed", "data.test=testbed"]
            config = load_config(None, [*overrides, f"model.path={pipeline}", "device=cpu", "exploration={}"])
            model = prepare_model(config, device)
            train = build.load_prompts(config).train
            chosen = train[:: max(1, len(train) // prompts)][:prompts]
            conditions = model.family.encode([prompt.text for prompt in chosen])
        model.family.free_text_encoder()
        model.family.read_weights([model.family.transformer])
        (negative,) = conditions[:1]  # no setting has guidance
        engine = build.make_engine(config, model.family, negative)
        with build.make_reward_pool(config) as rewards:
            bench = Bench(config, model, engine, rewards, chosen, conditions, seeds)
            settings = [setting for setting in settings_of(steps) if only in str(setting)]
            figures += measure(bench, name, settings, clock)
    size = f"rollouts of {steps} steps, {prompts} prompts x {seeds} seeds"
    show(figures, f"Previews of {size}, {clock} time")
    if json is not None:
        asked: dict[str, object] = {"prompts": prompts, "seeds": seeds, "steps": steps}
        asked |= {"clock": clock, "only": only}
        write(json, figures, device, asked)


def write(
    path: Path,
    figures: Sequence[Figures],
    device: torch.device,
    settings: Mapping[str, object],
) -> None:
    """Everything measured, as JSON."""
    rows = [asdict(row) | {"of_whole": asdict(ratio(row.seconds, row.whole_seconds))} for row in figures]
    write_result(path, "cheap previews", machine(device), {"settings": dict(settings), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
