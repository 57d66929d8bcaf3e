"""``spotlight generate``: images from a run's weights."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from spotlight.cli.options import (
    BestOption,
    CurveOption,
    DeviceOption,
    IterationOption,
    QuantizeOption,
    WeightsOption,
    open_run,
)
from spotlight.cli.run_argument import RunArgument
from spotlight_rewards.base.terminal import printable
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure
from spotlight_rewards.commands.options import read_prompts_option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spotlight.runtime.inference import TrainedRun

_SLUG_MAX = 48


PromptOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="What to draw; may be given several times."),
]
PromptsOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="File of prompts to draw, .txt or .jsonl."),
]
HeightOption: TypeAlias = Annotated[int | None, typer.Option(min=1, help="In pixels (default: the run's).")]
WidthOption: TypeAlias = HeightOption
StepsOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps (default: the run's).")
]
GuidanceOption: TypeAlias = Annotated[
    float | None,
    typer.Option(min=1.0, help="True CFG scale (default: the run's)."),
]
ReferenceOption: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        help="Picture to edit; may be given several times; every prompt uses all of them.",
        exists=True,
        dir_okay=False,
    ),
]
BeforeOption: TypeAlias = Annotated[
    bool, typer.Option("--before", help="Also draw with the weights before training, side by side.")
]
OutOption: TypeAlias = Annotated[Path | None, typer.Option("--out", help="Folder (default: RUN/generated).")]


def generate(
    run: RunArgument,
    prompt: PromptOption = None,
    prompts: PromptsOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="The first seed.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt, with successive seeds.")] = 1,
    height: HeightOption = None,
    width: WidthOption = None,
    steps: StepsOption = None,
    guidance: GuidanceOption = None,
    reference: ReferenceOption = None,
    before: BeforeOption = False,
    out: OutOption = None,
    weights: WeightsOption = None,
    iteration: IterationOption = None,
    best: BestOption = False,
    by: CurveOption = None,
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
) -> None:
    """Generate images with a checkpoint of a run, by default the newest.

    Equal seeds give equal images. With --before, before-after.png shows both sides. Models that edit pictures
    get them by --reference.

    [bold]Examples[/bold]

      spotlight generate demo --prompt "two red circles"

      spotlight generate demo -p "a blue square" -p "a green triangle" --count 4 --before

      spotlight generate demo --prompts prompts.txt --height 48 --width 32
    """
    with errors_without_traceback():
        listed = [] if prompts is None else read_prompts_option("--prompts", prompts)
        drawn = [*(prompt or ()), *(each.text for each in listed)]
        odd = [text for text in drawn if not text.strip() or text.encode(errors="ignore").decode() != text]
        if odd or not drawn:
            said = "expected text in UTF-8 that is not empty. Say what to draw."
            raise failure(f"--prompt: found {drawn}; {said}")
        if any(each.references for each in listed) and not reference:
            raise failure(f"--prompts: {prompts} names references. Give them by --reference, for all.")
        pairs = [(text, seed + index) for text in drawn for index in range(count)]
        trained = open_run(run, device, weights, iteration, best, by, quantize).with_size(height, width)
        untrained = trained.with_weights("reference") if before else None  # fail now rather than at the end
        texts, seeds = [text for text, _ in pairs], [number for _, number in pairs]
        shown = reference or []
        after = trained.generate(texts, seeds, steps, guidance, shown)
        folder = out or trained.directory / "generated"
        written = _save(folder, pairs, after, trained, "")
        if untrained is not None:
            old = untrained.generate(texts, seeds, steps, guidance, shown)
            written += _save(folder, pairs, old, untrained, "-before")
            written.append(_save_comparison(folder, pairs, old, after, trained, shown))
    for path in written:
        typer.echo(printable(path))


def _save(
    folder: Path,
    pairs: list[tuple[str, int]],
    pictures: NDArray[np.uint8],
    trained: TrainedRun,
    suffix: str,
) -> list[Path]:
    from spotlight_rewards.base.media_files import encode_picture, encode_video

    paths = []
    for (text, seed), media in zip(pairs, pictures, strict=True):
        about = {"prompt": text, "seed": seed, "run": trained.directory.name, "iteration": trained.iteration}
        about["weights"] = trained.weights
        file = folder / f"{slug(text)}-seed{seed}{suffix}"
        if media.ndim == 3:
            paths.append(_write(file.with_suffix(".png"), encode_picture(media, about)))
        else:
            fps = trained.config.rollout.fps
            paths.append(_write(file.with_suffix(".mp4"), encode_video(media, about, fps)))
    return paths


def _save_comparison(
    folder: Path,
    pairs: list[tuple[str, int]],
    old: NDArray[np.uint8],
    new: NDArray[np.uint8],
    trained: TrainedRun,
    references: list[Path],
) -> Path:
    from spotlight_rewards.base.picture_page import BEFORE_AFTER, Strip, picture_of, write_strips

    shown = tuple(map(picture_of, references))
    strips = [
        Strip(f"{text} (seed {seed})", ((one, "before"), (other, "after")), shown)
        for (text, seed), one, other in zip(pairs, old, new, strict=True)
    ]
    title = f"{trained.directory.name}: before and after {trained.iteration} iterations"
    path = folder / BEFORE_AFTER
    path.parent.mkdir(parents=True, exist_ok=True)
    write_strips(path, title, strips, fps=trained.config.rollout.fps)
    return path


def _write(path: Path, content: bytes) -> Path:
    from spotlight_rewards.base.file_errors import storage_errors
    from spotlight_rewards.base.files import write_atomically

    with storage_errors("cannot write the picture", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path


def slug(text: str) -> str:
    """A prompt as part of a file name: its first words in lower case.

    With a hash of the prompt if they are not all of it: other prompts have other names.
    """
    words = re.sub(r"[^\w]+", "-", text.lower()).strip("-")[:_SLUG_MAX] or "picture"
    if words.replace("-", " ") == text:
        return words
    return f"{words}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"
