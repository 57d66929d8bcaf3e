"""``spotlight prompts``: make training and held-out prompts for a reward."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from spotlight.cli.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from spotlight.scheduler.types import Prompt


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
        typer.Option("--held-out", min=1, help="Held-out prompts [default: a tenth].", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed makes the same files.")] = 0,
    without: Annotated[
        Path | None,
        typer.Option("--without", metavar="FILE", help="A prompts file whose scenes or texts to leave out."),
    ] = None,
) -> None:
    """Make training and held-out prompts from templates: no scene, or text to draw, is in both.

    geneval: train.jsonl and test.jsonl in GenEval's metadata format, its six tags in equal shares.
    ocr: train.txt and test.txt, a prompt a line with the text to draw in quotes.

    [bold]Examples[/bold]

      spotlight prompts geneval prompts --count 50000 --seed 7 --without evaluation_metadata.jsonl

      spotlight prompts ocr prompts/ocr --count 20000 --held-out 1000
    """
    ending = "jsonl" if kind is PromptKind.GENEVAL else "txt"
    paths = [out / f"{name}.{ending}" for name in ("train", "test")]
    for path in paths:
        if path.exists():
            raise failure(
                f"{path} is there already; expected a new file. Name another directory, or move it."
            )
    with errors_without_traceback():
        known = _read(without)
        sizes = count, max(count // 10, 1) if held_out is None else held_out, seed
        sets = _geneval(*sizes, known) if kind is PromptKind.GENEVAL else _ocr(*sizes, known)
        out.mkdir(parents=True, exist_ok=True)
        for path, lines in zip(paths, sets, strict=True):
            path.write_text("".join(f"{line}\n" for line in lines))
    console = Console(highlight=False)
    for path, lines in zip(paths, sets, strict=True):
        console.print(f"{path}: {len(lines):,} prompts", soft_wrap=True)
    console.print(f"Use them: data.train={paths[0]} data.test={paths[1]}", soft_wrap=True)


def _read(path: Path | None) -> list[Prompt]:
    from spotlight.data.prompt_files import PromptFileError, parse_prompts

    if path is None:
        return []
    try:
        return parse_prompts(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(
            f"--without {path} cannot be read ({error}); expected a prompts file"
        ) from error


def _geneval(count: int, held_out: int, seed: int, known: list[Prompt]) -> tuple[list[str], list[str]]:
    from spotlight.rewards.prompt_sets.geneval_prompts import geneval_prompts

    records = [{"prompt": each.text, **each.metadata} for each in known]
    train, test = geneval_prompts(count, held_out, seed, records)
    return list(map(json.dumps, train)), list(map(json.dumps, test))


def _ocr(count: int, held_out: int, seed: int, known: list[Prompt]) -> tuple[list[str], list[str]]:
    from spotlight.rewards.ocr import target_of
    from spotlight.rewards.prompt_sets.ocr_prompts import ocr_prompts

    return ocr_prompts(count, held_out, seed, [target_of(each.text) for each in known])
