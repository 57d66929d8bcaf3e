"""The model card of a run: a folder with ``README.md``, images and curves, ready for a model hub.

    card/README.md            front matter, scores, gallery, curves, use, configuration, cost
    card/before-after.png     the same held-out prompts and seeds before and after training
    card/progress.png         the same prompts at several iterations
    card/validation.svg       curves with standard errors; reward.svg, loss.svg

Rewriting replaces it. It names the licence of the model that was trained, none of its own: that is for the
owner to choose. It is meant for the public: of the configuration (:func:`published_settings`) it has numbers
and choices, never free text such as places, addresses, commands and parameters of rewards; a key that is new
is published only if it is a number or a choice of a section that is listed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from spotlight.config.schema import RunConfig
from spotlight.licences import licence_line
from spotlight.registry import FAMILIES
from spotlight.report.final_screen import in_noise, prices, survived
from spotlight.report.loading import loading_snippet, whole_base_note
from spotlight.report.record import RunRecord
from spotlight.report.wording import count, duration, money, plural, score
from spotlight.scheduler.types import Purpose
from spotlight.store.images import drawn_iterations, write_comparison, write_progress
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import changes_by_iteration, course_words
from spotlight.store.metrics import GRADED, STRICT
from spotlight.store.store_errors import NothingToCompareError
from spotlight.testbed import TESTBEDS
from spotlight_rewards.base.charts import Mark, Series, line_chart
from spotlight_rewards.base.file_errors import storage_errors
from spotlight_rewards.base.files import at_home, write_atomically

CARD_FOLDER = "card"
_MOST_REFUSED = 5
_PROGRESS_COLUMNS, _PROGRESS_ROWS = 6, 6
_CHARTS = (
    ("reward", "rollout/reward", "Reward of the training samples", "mean reward"),
    ("loss", "train/loss", "Loss", "loss"),
    ("grad-norm", "train/grad_norm", "Gradient norm before clipping", "norm"),
)


_CURVES = {
    GRADED: "the mean total reward, which training maximises",
    STRICT: "the share of pictures that pass the rewards' verdict of 1 or 0",
}


def write_card(run: RunRecord) -> Path:
    """Write the card of a run with a validation; returns the README's path. Raises StoreError."""
    folder = run.paths.path / CARD_FOLDER
    with storage_errors("cannot write the model card", folder):
        folder.mkdir(exist_ok=True)
        pictures = [_copied(path, folder) for path in _pictures(run)]
        charts = [_drawn(folder / f"{name}.svg", svg) for name, svg in _charts(run)]
        readme = folder / "README.md"
        write_atomically(readme, card_text(run, pictures, charts).encode())
    return readme


def card_text(run: RunRecord, pictures: list[str], charts: list[str]) -> str:
    """The card's Markdown; ``pictures`` and ``charts`` are file names in its folder."""
    sections = [
        f"---\n{_front_matter(run)}\n---",
        f"# {run.config.name}",
        _introduction(run),
    ]
    if run.validations:
        sections += ["## Scores", _scores(run)]
    if pictures:
        sections += ["## Gallery", *(f"![{_alt(name)}]({name})" for name in pictures)]
    lora, weights = run.config.learner.mode == "lora", run.weights
    if weights is None and not lora and run.history.state == "finished":
        weights = run.paths.path / "merged"  # a bucket keeps it: too large to be brought for its name
    if weights is not None:
        snippet = loading_snippet(run.config, weights.resolve(), prompt=run.example_prompt)
        hint = f"Once {'the LoRA' if lora else 'the model'} is on a hub, its id replaces the path."
        if lora:
            hint = " ".join(filter(None, (hint, _where_it_loads(run.config), whole_base_note(run.config))))
        sections += ["## Use", f"```python\n{without_places(snippet)}\n```\n\n{hint}"]
    if charts:
        sections += ["## Curves", *(f"![{_alt(name)}]({name})" for name in charts)]
    sections += ["## Licence of the model it was trained from", _licence(run.config)]
    sections += ["## What it cost and survived", _cost(run)]
    sections += [
        "## Configuration",
        "<details><summary>The settings of training</summary>\n\n"
        f"```yaml\n{published_settings(run.config).rstrip()}\n```\n\n</details>",
    ]
    return "\n\n".join(sections) + "\n"


def _licence(config: RunConfig) -> str:
    """Of a folder of one's own, without its place."""
    base = config.model.path if config.model.path in TESTBEDS else hub_model(config)
    if base is None:
        return "Not known here: the model came from a folder. Ask its publisher."
    said, where = licence_line(base)
    return f"{said} ({where})."


def _where_it_loads(config: RunConfig) -> str:
    family = FAMILIES.load(config.model.family)
    names = "the model's own names, as ComfyUI expects them" if family.native_layers else "diffusers' names"
    said = f"Its layers have {names}; B includes alpha / rank, so nothing has to scale it."
    if not family.lora_names:
        return f"{said} How ComfyUI and kohya's scripts name this family's layers is not known."
    commands = " and ".join(
        f"`spotlight export {config.name} --format {layout}` for {program}"
        for layout, program in (("comfyui", "ComfyUI"), ("kohya", "sd-scripts or musubi-tuner"))
        if layout in family.lora_names
    )
    return f"{said} For other programs' names: {commands}."


def _front_matter(run: RunRecord) -> str:
    """The hub's metadata as YAML, the last validation's scores included."""
    from huggingface_hub import EvalResult, ModelCardData

    config = run.config
    task = "text-to-video" if FAMILIES.load(config.model.family).video else "text-to-image"
    lora = config.learner.mode == "lora"
    base = hub_model(config)  # the hub resolves ids only; a local directory would be a dead link
    scores = [
        EvalResult(
            task_type=task,
            dataset_type="prompts",
            dataset_name="held-out prompts",
            metric_type=name,
            metric_value=round(run.validations[-1].scores[name].mean, 6),
        )
        for name in (run.curves if run.validations else ())
    ]
    matter = ModelCardData(
        library_name="diffusers",
        pipeline_tag=task,
        tags=[
            task,
            "diffusers",
            *(["lora"] if lora else []),
            "reinforcement-learning",
            config.algorithm.name,
            config.model.family,
            "spotlight",
        ],
        base_model=base,
        base_model_relation=("adapter" if lora else "finetune") if base else None,
        model_name=config.name if scores else None,
        eval_results=scores or None,
    )
    return str(matter.to_yaml())


def _introduction(run: RunRecord) -> str:
    config = run.config
    chosen = config.algorithm.train_samples
    trained = f" (of which {chosen} are trained)" if chosen is not None else ""
    what = (
        f"A LoRA (rank {config.learner.lora.rank}, alpha {config.learner.lora.alpha:g})"
        if config.learner.mode == "lora"
        else "A full fine-tune"
    )
    base = (
        f"the tiny `{FAMILIES.load(config.model.family).pipeline_class}` that ships with Spotlight"
        if config.model.path in TESTBEDS
        else f"`{hub_model(config) or Path(config.model.path).name}`"
    )
    if config.model.quantize != "none":
        base += f", held in {config.model.quantize.upper()} for training and all scores,"
    rewards = ", ".join(
        f"`{reward_name(reward.name)}`" + (f" x {reward.weight:g}" if reward.weight != 1 else "")
        for reward in config.rewards
    )
    return (
        f"{what} of {base}, post-trained by reinforcement learning with {config.algorithm.name} "
        f"to maximise {rewards}: {plural(run.history.iterations, 'iteration')} of "
        f"{config.rollout.prompts_per_iteration} prompts x {config.rollout.group_size} pictures{trained} "
        f"({config.rollout.width} x {config.rollout.height} pixels, {config.rollout.steps} denoising steps), "
        f"run seed {config.run_seed}."
    )


def _scores(run: RunRecord) -> str:
    lines = [f"| held-out prompts | {run.since} | after | margin |", "|---|---|---|---|"]
    if len(run.validations) == 1:
        lines = [f"| held-out prompts | {run.since} |", "|---|---|"]
    last = run.validations[-1].scores
    names = [*run.curves, *sorted(name for name in last if name.startswith("tag/"))]
    judges = [reward.curve for reward in run.config.rewards if reward.weight == 0]
    names += [name for name in last if name.split("/")[0] in judges]
    for name in names:
        if name not in run.validations[0].scores:
            continue
        label, change = name.removeprefix("tag/"), run.change(name)
        if len(run.validations) == 1:
            lines.append(f"| {label} | {score(change.after.mean, change.after.stderr)} |")
            continue
        before, after = change.before, change.after
        lines.append(
            f"| {label} | {score(before.mean, before.stderr)} "
            f"| {score(after.mean, after.stderr)} | {change.margin:+.3f} {in_noise(change)} |"
        )
    meanings = [f"`{name}`: {_CURVES[name]}." for name in run.curves]
    meanings += [_not_shared(run, judge) for judge in judges]
    note = (
        f"{' '.join(meanings)} "
        f"Means over {run.config.evaluation.images_per_prompt} pictures a prompt, the same prompts and seeds "
        f"before and after, {run.config.evaluation.steps} ODE steps; ± is one standard error. The noise of a "
        "margin is that of two independent evaluations."
    )
    return "\n".join(lines) + f"\n\n{note}"


def _not_shared(run: RunRecord, judge: str) -> str:
    """What a reward of weight 0 says of the pictures that pass the strict curve."""
    said = f"`{judge}` was not trained on: pictures that please only the reward may have fooled it."
    strict = run.config.evaluation.strict or ""
    detail = f"{judge}/{strict.partition('/')[2]}"
    with closing(queries.open_readonly(run.paths.ledger)) as connection:
        by_prompt = queries.passed_and_refused(connection, strict, detail)
    if not by_prompt:
        return said
    pictures, refused = (sum(column) for column in zip(*by_prompt.values(), strict=True))
    most = ", ".join(
        f"{text} ({lost})" for text, (_, lost) in list(by_prompt.items())[:_MOST_REFUSED] if lost
    )
    return (
        f"{said} Of the last {count(pictures)} pictures with `{strict}` = 1 it refuses {count(refused)} "
        f"(`{detail}` < 1){f', most of: {most}' if most else ''}."
    )


def _cost(run: RunRecord) -> str:
    history, counts = run.history, run.history.counts
    dropped = "".join(f", {count(number)} {reason.words}" for reason, number in counts.train_dropped.items())
    lines = [
        f"- {duration(run.wall_s)} of work, {money(history.cost_usd)} at {prices(run)} per worker and hour.",
        f"- {count(counts.issued[Purpose.TRAIN])} training samples issued: {count(counts.trained)} "
        f"trained{dropped}; "
        f"{count(counts.optimizer_steps)} optimizer steps.",
        f"- {survived(run) or 'No interruption'}.",
        *(f"- Changed during the run: {said}." for said in course_words(history.course)),
    ]
    spent = sorted(run.history.gpu_seconds_by_phase.items(), key=lambda item: -item[1])
    table = ["| phase | worker seconds |", "|---|---|"]
    table += [f"| {phase.value} | {seconds:,.1f} |" for phase, seconds in spent if seconds >= 0.05]
    return "\n".join(lines) + "\n\n" + "\n".join(table)


def _pictures(run: RunRecord) -> Iterator[Path]:
    drawn = drawn_iterations(run.paths)
    if len(drawn) > 1:
        count_shown = min(len(drawn), _PROGRESS_COLUMNS)
        spaced = [drawn[index * (len(drawn) - 1) // (count_shown - 1)] for index in range(count_shown)]
        with suppress(NothingToCompareError):  # the evaluations had other prompts
            title = f"{run.config.name}: before and after {plural(drawn[-1], 'iteration')}"
            yield write_comparison(run.paths, before=drawn[0], after=drawn[-1], title=title)
            title = f"{run.config.name}: the same seeds over the iterations, with their scores"
            yield write_progress(run.paths, spaced, rows=_PROGRESS_ROWS, title=title)


def _charts(run: RunRecord) -> Iterator[tuple[str, str]]:
    changed = changes_by_iteration(run.history.course)
    marks = [Mark(iteration, "; ".join(words)) for iteration, words in changed.items()]
    if run.validations:
        iterations = [row.iteration for row in run.validations]
        curves = [
            Series(
                name,
                iterations,
                [row.scores[name].mean for row in run.validations],
                [row.scores[name].stderr for row in run.validations],
            )
            for name in run.curves
        ]
        yield (
            "validation",
            line_chart(
                curves,
                title="Validation on held-out prompts (band: one standard error)",
                x_label="iterations trained",
                y_label="mean score",
                marks=marks,
            ),
        )
    for name, key, title, label in _CHARTS:
        rows = [row for row in run.rows if key in row.values]
        values = [row.values[key] for row in rows]
        if any(value == value for value in values):  # not all NaN
            series = Series(key, [row.iteration for row in rows], values)
            yield name, line_chart([series], title=title, x_label="iteration", y_label=label, marks=marks)


def _copied(path: Path, folder: Path) -> str:
    shutil.copyfile(path, folder / path.name)
    return path.name


def _drawn(path: Path, svg: str) -> str:
    write_atomically(path, svg.encode())
    return path.name


def _alt(file_name: str) -> str:
    return Path(file_name).stem.replace("-", " ")


# -- what a model card tells of a configuration: numbers and choices of training, never free text ----------


_SECTIONS = ("model", "rollout", "algorithm", "learner", "exploration", "pipeline", "evaluation")
_KEYS = ("run_seed", "iterations", "deterministic", *_SECTIONS, "reward_policy")
_NAMES = ("algorithm.name", "model.family", "learner.lora.targets")
"""Texts that say what was trained and how: names of this program, and of layers."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PLACE = re.compile(r"""(['"])/(?:(?!\1).)*/((?:(?!\1|/).)+)\1""")


def published_settings(config: RunConfig) -> str:
    """YAML of what may be published."""
    tree = _shown(config, _KEYS, "")
    if (base := hub_model(config)) is not None:
        tree["model"] |= {"path": base, "revision": config.model.revision}
    tree["rewards"] = [{"name": reward_name(each.name), "weight": each.weight} for each in config.rewards]
    return str(yaml.safe_dump(tree, sort_keys=False, width=100))


def hub_model(config: RunConfig) -> str | None:
    """The id of the model on the hub; None: it is a folder somewhere."""
    path = config.model.path
    found = path not in TESTBEDS and _HUB_ID.fullmatch(path) and not at_home(path).exists()
    return path if found else None


def reward_name(name: str) -> str:
    """Of a function of one's own, without its module or file."""
    return name.rpartition(":")[2]


def without_places(code: str) -> str:
    """Python whose absolute paths are placeholders with the same last part."""
    return _PLACE.sub(r"\1PATH/TO/\2\1", code)


def _shown(section: BaseModel, names: Iterable[str], prefix: str) -> dict[str, Any]:
    fields = type(section).model_fields
    return {
        name: shown
        for name in names
        for shown in _published(getattr(section, name), f"{prefix}{name}", fields[name].annotation)
    }


def _published(value: Any, key: str, annotation: Any) -> Iterator[Any]:
    """The value as plain YAML, once if it is published."""
    if isinstance(value, BaseModel):
        yield _shown(value, type(value).model_fields, f"{key}.")
    elif value is None or isinstance(value, bool | int | float) or value in _choices(annotation):
        yield value
    elif isinstance(value, tuple) and (key in _NAMES or all(isinstance(each, int | float) for each in value)):
        yield list(value)
    elif key in _NAMES:
        yield value


def _choices(annotation: Any) -> Iterator[object]:
    """Values of the literals in a type."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)
