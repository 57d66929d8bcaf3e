"""``spotlight prompts``: make training and held-out prompts for a reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure
from spotlight_rewards.commands.options import read_prompts_option

if TYPE_CHECKING:
    from spotlight_rewards.base.prompts import Prompt


_HELD_OUT_OCR_MAX = 1000
"""By default: there are fewer texts to draw than prompts, and no text may be in both sets."""
_Lines: TypeAlias = tuple[list[str], list[str]]


class PromptKind(StrEnum):
    """What the prompts are for."""

    GENEVAL = "geneval"
    OCR = "ocr"


def prompts(
    kind: Annotated[PromptKind, typer.Argument(metavar="geneval|ocr", help="What the prompts are for.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write them to.")],
    count: Annotated[int, typer.Option("--count", min=1, help="Training prompts.")] = 5000,
    held_out: Annotated[
        int | None,
        typer.Option("--held-out", min=1, help="Held-out prompts (default: a tenth; of ocr at most 1000)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed makes the same files.")] = 0,
    without: Annotated[
        Path | None,
        typer.Option("--without", metavar="FILE", help="A prompts file whose scenes or texts to leave out."),
    ] = None,
) -> None:
    """Make training and held-out prompts from templates: no scene, or text to draw, is in both.

    geneval: train.jsonl and test.jsonl in GenEval's metadata format, its six tags in shares that are
    equal as far as a tag has enough scenes.

    ocr: train.txt and test.txt, a prompt a line with the text to draw in quotes.

    [bold]Examples[/bold]

      spotlight prompts geneval prompts --count 50000 --seed 7 --without evaluation_metadata.jsonl

      spotlight prompts ocr prompts/ocr --count 20000 --held-out 1000
    """
    ending = "jsonl" if kind is PromptKind.GENEVAL else "txt"
    paths = [out / f"{name}.{ending}" for name in ("train", "test")]
    for path in paths:
        if is_there(path):
            raise failure(
                f"{path} is there already; expected a new file. Name another directory, or move it."
            )
    with errors_without_traceback():
        known = [] if without is None else read_prompts_option("--without", without)
        most = count if kind is PromptKind.GENEVAL else _HELD_OUT_OCR_MAX
        sizes = count, min(max(count // 10, 1), most) if held_out is None else held_out, seed
        sets, tags = _geneval(*sizes, known) if kind is PromptKind.GENEVAL else (_ocr(*sizes, known), None)
        try:
            out.mkdir(parents=True, exist_ok=True)
            for path, lines in zip(paths, sets, strict=True):
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise failure(
                f"OUT: the prompts cannot be written to {out} ({type(error).__name__}: {error.strerror}); "
                "expected a directory, or where one can be made. Name another."
            ) from error
    _print_written(paths, sets, tags)


def _print_written(
    paths: Sequence[Path], sets: Sequence[Sequence[str]], tags: Sequence[Mapping[str, int]] | None
) -> None:
    console = TextConsole()
    for index, (path, lines) in enumerate(zip(paths, sets, strict=True)):
        by_tag = f" ({', '.join(f'{tag} {n:,}' for tag, n in tags[index].items())})" if tags else ""
        console.print(f"{path}: {len(lines):,} prompts{by_tag}", soft_wrap=True)
    console.print(f"Use them: data.train={paths[0]} data.test={paths[1]}", soft_wrap=True)


def _geneval(
    count: int, held_out: int, seed: int, known: list[Prompt]
) -> tuple[_Lines, list[dict[str, int]]]:
    """Lines of both sets, and the prompts per tag of each; warns of tags whose every scene is left out."""
    from spotlight_rewards.geneval.vocabulary import TAGS
    from spotlight_rewards.prompt_sets.geneval_prompts import geneval_prompts

    records = [{"prompt": each.text, **each.metadata} for each in known]
    sets = geneval_prompts(count, held_out, seed, records)
    tags = [{tag: sum(each["tag"] == tag for each in part) for tag in TAGS} for part in sets]
    # Asked for at least one per tag, only a tag without any scene gets none.
    if count >= len(TAGS) and (gone := [tag for tag, number in tags[0].items() if number == 0]):
        TextConsole(stderr=True).print(
            f"Warning: no prompts with the tag {', '.join(gone)}: --without has every such scene. "
            "The other tags have the more; leave out fewer to train on it too.",
            soft_wrap=True,
        )
    train, test = sets
    return (list(map(json.dumps, train)), list(map(json.dumps, test))), tags


def _ocr(count: int, held_out: int, seed: int, known: list[Prompt]) -> tuple[list[str], list[str]]:
    from spotlight_rewards.prompt_sets.ocr_prompts import ocr_prompts
    from spotlight_rewards.reading.legibility import target_of

    return ocr_prompts(count, held_out, seed, [target_of(each.text) for each in known])
