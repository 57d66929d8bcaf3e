"""``spotlight score``: score pictures with a reward, as training does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.table import Table

from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import EXIT_STOPPED_BY_ERROR, errors_without_traceback, failure
from spotlight_rewards.commands.options import read_prompts_option
from spotlight_rewards.commands.reward_argument import (
    START_DEADLINE_S,
    DeadlineOption,
    ParamOption,
    reward_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spotlight_rewards.base.prompts import Prompt
    from spotlight_rewards.reward_config import RewardConfig

_AT_ONCE = 16
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".mp4"})

PromptsOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts in the pictures' order, .txt or .jsonl: one per picture, or one for each run of N "
        "consecutive pictures (default: what spotlight generate wrote into them).",
    ),
]
PromptOption: TypeAlias = Annotated[str | None, typer.Option("--prompt", help="One prompt, of all pictures.")]
SheetOption: TypeAlias = Annotated[
    Path, typer.Option("--sheet", metavar="FILE", help="Where to draw the best and the worst.")
]


@dataclass(frozen=True, slots=True)
class _Picture:
    """One file to score; ``media``: [height, width, 3], of a video [frames, ...]; ``group``: its prompt's."""

    path: Path
    media: NDArray[np.uint8]
    prompt: str
    metadata: dict[str, Any]
    group: str


@dataclass(frozen=True, slots=True)
class _Scored:
    """``value`` and ``details``, or why there are none."""

    picture: _Picture
    value: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def score(
    reward: Annotated[str, typer.Argument(metavar="REWARD", help="As in rewards[].name.")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...", help="Pictures or videos, or folders of them.")
    ],
    prompts: PromptsOption = None,
    prompt: PromptOption = None,
    param: ParamOption = None,
    sheet: SheetOption = Path("scores.png"),
    show: Annotated[int, typer.Option("--show", min=1, help="Best, and worst, to draw.")] = 4,
    deadline_s: DeadlineOption = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Score pictures with a reward: the processes, checks and failures are those of training.

    To score a checkpoint of a run, first draw with it: spotlight generate,
    with --iteration N or --best.

    Exit status: 0 all scored, 1 some could not be, 2 not started or no sheet drawn.

    [bold]Examples[/bold]

      spotlight score pickscore runs/demo/generated

      spotlight generate demo --best --prompts p.txt --out best && spotlight score pickscore best

      spotlight score pickscore a.png b.png --prompt "two red circles"

      spotlight score ocr a.png b.png --prompts prompts.txt --json

      spotlight score geneval pictures --prompts evaluation_metadata.jsonl -p detector=weights/geneval
    """
    with errors_without_traceback():
        from spotlight_rewards.base.file_errors import StoreError
        from spotlight_rewards.registry import REWARDS
        from spotlight_rewards.reward_registry import facts_of

        config = reward_of(reward, param, deadline_s)
        # A reward of one's own is imported in its own process only.
        facts = facts_of(reward) if reward in REWARDS else None
        pictures = list(_pictures(_files(images, sheet), _given(prompts, prompt, config)))
        reads = None if facts is None else facts.reads
        _require_prompts(reward, reads, pictures)
        scored, scored_by = _score(config, pictures)

        def show_scores(drawn: Path | None) -> None:
            if as_json:
                typer.echo(json.dumps(_as_json(reward, scored_by, scored, drawn), indent=2))
            else:
                _print(scored, scored_by, drawn)

        try:
            drawn = _draw(sheet, reward, scored, show)
        except StoreError:
            show_scores(None)  # scoring may have taken long
            raise
    show_scores(drawn)
    if any(each.value is None for each in scored):
        raise typer.Exit(EXIT_STOPPED_BY_ERROR)


def _files(images: Sequence[Path], sheet: Path) -> list[Path]:
    from spotlight_rewards.base.picture_page import BEFORE_AFTER

    drawn = {sheet.resolve(), sheet.with_suffix(".webp").resolve()}
    found: list[Path] = []
    for path in images:
        inside = sorted(
            each
            for each in path.glob("*")
            # What `spotlight generate` and this command draw of pictures is no sample.
            if each.suffix.lower() in _SUFFIXES
            and each.stem != Path(BEFORE_AFTER).stem
            and each.resolve() not in drawn
        )
        if path.is_dir() and not inside:
            raise failure(f"IMAGES: {path} holds no pictures; expected files that end in one of "
                          f"{', '.join(sorted(_SUFFIXES))}. Name another folder.")  # fmt: skip
        found += inside if path.is_dir() else [path]
    return found


def _given(prompts: Path | None, prompt: str | None, reward: RewardConfig) -> list[Prompt] | None:
    from spotlight_rewards.base.prompts import Prompt, PromptId

    if prompts is not None and prompt is not None:
        raise failure(f"--prompt: found {prompt!r} with --prompts; expected one of the two. Leave one out.")
    if prompt is not None:
        return [Prompt(PromptId(prompt), prompt, {})]
    files = [] if reward.reads_file_of is None else [reward.reads_file_of]
    return None if prompts is None else read_prompts_option("--prompts", prompts, files)


def _pictures(files: Sequence[Path], given: list[Prompt] | None) -> Iterator[_Picture]:
    from spotlight_rewards.base.media_files import read_media

    if given is not None and len(files) % len(given):
        raise failure(
            f"--prompts: found {len(given)} prompts for {len(files)} pictures; expected one per "
            "picture, or one for each run of N consecutive pictures. Add the missing lines."
        )
    for index, path in enumerate(files):
        media, about = read_media(path)
        if given is None:
            prompt_text = str(about.get("prompt", ""))
            yield _Picture(path, media, prompt_text, {}, group=prompt_text)
        else:
            at = index * len(given) // len(files)
            yield _Picture(path, media, given[at].text, dict(given[at].metadata), group=str(at))


def _require_prompts(reward: str, reads: str | None, pictures: Sequence[_Picture]) -> None:
    bare = [
        each.path
        for each in pictures
        if (reads == "text" and not each.prompt) or (reads == "metadata" and not each.metadata)
    ]
    if bare:
        others = f" and {len(bare) - 1} more do" if len(bare) > 1 else " does"
        raise failure(
            f"IMAGES: the reward {reward!r} reads the prompt's {reads}, which {bare[0]}{others} not hold; "
            "expected a file of prompts. Give --prompts"
            f"{'' if reads == 'metadata' else ', or --prompt for all'}."
        )


def _score(config: RewardConfig, pictures: Sequence[_Picture]) -> tuple[list[_Scored], str]:
    from spotlight_rewards.models.batches import in_batches
    from spotlight_rewards.pool.reward_pool import RewardPool
    from spotlight_rewards.pool.waiting import SampleGroup
    from spotlight_rewards.results import RewardFailure

    sizes = Counter(each.group for each in pictures)
    scored: list[_Scored] = []
    with RewardPool([config], start_deadline_s=START_DEADLINE_S) as pool:
        pool.check([each.prompt for each in pictures], [each.metadata for each in pictures])
        at_once = len(pictures) if pool.compares_groups else _AT_ONCE  # a submission holds whole groups
        for part in in_batches(pictures, at_once):
            batch = pool.score(
                [each.media for each in part],
                [each.prompt for each in part],
                [each.metadata for each in part],
                [SampleGroup(each.group, sizes[each.group]) for each in part],
            )
            for each, result in zip(part, batch.samples, strict=True):
                if isinstance(result, RewardFailure):
                    scored.append(_Scored(each, reason=result.message))
                else:
                    details = result.scores[config.curve].details
                    scored.append(_Scored(each, result.total, details))
        scored_by = pool.scored_by.get(config.curve, "")
    worst_last = sorted(scored, key=lambda each: (each.value is None, -(each.value or 0)))
    return worst_last, scored_by


def _draw(path: Path, reward: str, scored: Sequence[_Scored], show: int) -> Path | None:
    from spotlight_rewards.base.file_errors import storage_errors
    from spotlight_rewards.base.picture_page import Strip, write_strips

    judged = [(each.picture, each.value) for each in scored if each.value is not None]
    if not judged:
        return None
    ends = (
        (("best", judged[:show]), ("worst", judged[max(show, len(judged) - show) :]))
        if len(judged) > show
        else (("all", judged),)
    )
    strips = [
        Strip(f"{picture.path.name}: {picture.prompt}", ((picture.media, f"{end}  {value:.4g}"),))
        for end, part in ends
        for picture, value in part
    ]
    mean = sum(value for _, value in judged) / len(judged)
    with storage_errors("cannot write the picture", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_strips(path, f"{reward}: mean {mean:.4g} of {len(judged)}", strips)
    return path


def _as_json(reward: str, scored_by: str, scored: Sequence[_Scored], drawn: Path | None) -> dict[str, object]:
    pictures = []
    for each in scored:
        row: dict[str, object] = {"file": str(each.picture.path), "prompt": each.picture.prompt}
        if each.value is None:
            row["error"] = each.reason
        else:
            row |= {"score": each.value, "details": dict(each.details)}
        pictures.append(row)
    sheet = None if drawn is None else str(drawn)
    return {"reward": reward, "scored_by": scored_by, "sheet": sheet, "pictures": pictures}


def _print(scored: Sequence[_Scored], scored_by: str, drawn: Path | None) -> None:
    console = TextConsole()
    curves = list(dict.fromkeys(name for each in scored for name in each.details))
    table = Table(box=None, pad_edge=False)
    for title in ("score", *curves):
        table.add_column(title, justify="right")
    for title in ("picture", "prompt"):
        table.add_column(title, overflow="fold")
    for each in scored:
        if each.value is None:
            continue
        cells = [f"{each.details[name]:.4g}" if name in each.details else "-" for name in curves]
        table.add_row(f"{each.value:.4g}", *cells, str(each.picture.path), each.picture.prompt)
    if table.row_count:
        console.print(table)
    for each in scored:
        if each.value is None:
            console.print(f"{each.picture.path}: {each.reason}", style="red", soft_wrap=True)
    if scored_by:
        console.print(f"scored by {scored_by}", soft_wrap=True)
    if drawn is not None:
        console.print(f"best and worst: {drawn}", soft_wrap=True)
