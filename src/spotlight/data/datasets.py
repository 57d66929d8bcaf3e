"""Read a run's prompt files. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotlight.config.schema import RunConfig
from spotlight.data.section_names import under
from spotlight.data.stored_data import PAIR_FILES, folder_text, with_pairs
from spotlight.scheduler.seeds import prompts_of_iteration, spares_of_iteration
from spotlight.testbed import TESTBEDS
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.kept_pictures import PICTURES_FOLDER
from spotlight_rewards.base.prompt_datasets import USUAL, Columns, is_dataset
from spotlight_rewards.base.prompt_files import (
    PROMPT,
    parse_prompts,
    read_text,
    with_found_pictures,
    with_tags,
)
from spotlight_rewards.base.prompts import Prompt, PromptId

_EVALUATED_SHARE_MAX = 0.5
_REPLACEMENT = "\ufffd"
_LINES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Prompts:
    """Training and held-out prompts of a run."""

    train: tuple[Prompt, ...]
    test: tuple[Prompt, ...]

    @property
    def by_id(self) -> dict[PromptId, Prompt]:
        return {prompt.id: prompt for prompt in (*self.train, *self.test)}

    @property
    def ids(self) -> dict[str, list[PromptId]]:
        """Their ids in order, by the key that names their file."""
        return {
            "data.train": [prompt.id for prompt in self.train],
            "data.test": [prompt.id for prompt in self.test],
        }

    @property
    def shared(self) -> int:
        """Held-out prompts also trained on; they inflate validation scores."""
        trained = {(prompt.text, prompt.references) for prompt in self.train}
        return sum((prompt.text, prompt.references) in trained for prompt in self.test)

    def notes(self, config: RunConfig) -> tuple[str, ...]:
        """Warnings about unusual but valid prompts."""
        notes: list[str] = []
        wanted, there = config.rollout.prompts_per_iteration, len(self.train)
        if wanted > there:
            notes.append(
                f"rollout.prompts_per_iteration is {wanted}, but data.train has only {there}: an iteration "
                "takes some prompts more than once, each time as a group of its own. "
                f"Set it to at most {there}, or give more prompts."
            )
        if self.shared:
            notes.append(
                f"{self.shared} of {len(self.test)} held-out prompts are in data.train too: validation does "
                "not show how the model does on prompts that it was not trained on. "
                "Take them out of data.train, or put others in data.test."
            )
        notes += _replaced(config, self)
        limit = config.model.max_text_tokens
        if cut := [prompt for prompt in (*self.train, *self.test) if len(prompt.text.split()) > limit]:
            notes.append(
                f"{len(cut)} prompts have more than model.max_text_tokens={limit} words: the model reads the "
                f"first {limit} tokens, and the rest is cut. The first is {cut[0].text[:40]!r}... Shorten "
                "them, or raise the key as far as the model goes."
            )
        if (share := self.evaluated_share(config)) > _EVALUATED_SHARE_MAX:
            evaluation = config.evaluation
            pictures = len(self.test) * evaluation.images_per_prompt
            notes.append(
                f"{share:.0%} of all denoising steps will be evaluation: "
                f"{evaluation.count(config.iterations)} x {pictures} pictures ({len(self.test)} prompts x "
                f"evaluation.images_per_prompt={evaluation.images_per_prompt}). Lower that or "
                "evaluation.prompts, or evaluate less often (evaluation.every, at_start, at_end)."
            )
        return tuple(notes)

    def evaluated_share(self, config: RunConfig) -> float:
        """Share of evaluations in the denoising steps of the run; 0 where only they have any."""
        rollout, evaluation = config.rollout, config.evaluation
        if config.algorithm.trains_on_stored:
            return 0.0
        steps = config.algorithm.stops_at(rollout.steps)
        each = len(self.test) * evaluation.images_per_prompt * evaluation.steps
        evaluated = evaluation.count(config.iterations) * each
        rolled = rollout.prompts_per_iteration * rollout.group_size * steps * config.iterations
        return evaluated / (evaluated + rolled)

    def used(self, config: RunConfig) -> list[Prompt]:
        """The prompts that the run uses, without duplicates."""
        count, seed = config.rollout.prompts_per_iteration, config.run_seed
        spare = config.exploration.spare_prompts if config.exploration else 0
        by_id = self.by_id
        # The iterations take the first pass in order; where there are more, all prompts are taken.
        drawn = prompts_of_iteration(self.train, seed, 0, min(config.iterations * count, len(self.train)))
        met = dict.fromkeys(prompt.id for prompt in (*self.test, *drawn))
        for iteration in range(config.iterations if spare else 0):
            if len(met) == len(by_id):
                break
            planned = prompts_of_iteration(self.train, seed, iteration, count)
            spares = spares_of_iteration(self.train, seed, iteration, planned, spare)
            met |= dict.fromkeys(prompt.id for prompt in spares)
        return [by_id[prompt] for prompt in met]


def _replaced(config: RunConfig, prompts: Prompts) -> Iterator[str]:
    """Where files hold what stands for bytes that were no text, as some published ones do."""
    for key, some in (("train", prompts.train), ("test", prompts.test)):
        if any(_REPLACEMENT in prompt.text for prompt in some):
            path = _file_of(config, key)
            text = _text_of(key, path, _columns_of(config, key))
            lines = [
                number
                for number, line in enumerate(text.split("\n"), start=1)
                if _REPLACEMENT in line or json.dumps(_REPLACEMENT)[1:-1] in line.lower()
            ]
            shown = ", ".join(map(str, lines[:_LINES_SHOWN])) + ", ..." * (len(lines) > _LINES_SHOWN)
            yield (
                f"{len(lines)} lines of data.{key}={path} hold {_REPLACEMENT} (U+FFFD), which a converter "
                f"left for bytes that it could not read: {shown}. The model reads it as it is: write "
                "what was meant, or remove the lines."
            )


def _file_of(config: RunConfig, key: str) -> Path:
    given = getattr(config.data, key)
    return getattr(TESTBEDS[given], key) if given in TESTBEDS else Path(given)


def _columns_of(config: RunConfig, key: str) -> Columns:
    is_ours = getattr(config.data, key) in TESTBEDS
    return Columns(kept=config.cache / PICTURES_FOLDER) if is_ours else columns_of(config)


def columns_of(config: RunConfig) -> Columns:
    """What the columns of files hold that the run is trained or evaluated on."""
    kept = config.cache / PICTURES_FOLDER
    return Columns(config.data.prompt_column, config.data.reference_column, kept, files_read(config))


def files_read(config: RunConfig) -> tuple[str, ...]:
    """What names files beside ``references`` and ``pictures``: of pairs, and as the rewards read it."""
    return (*PAIR_FILES, *filter(None, (each.reads_file_of for each in config.rewards)))


def load_prompts(config: RunConfig) -> Prompts:
    """Read the prompt files.

    Raises:
        ConfigError: an unset file with a model other than the testbeds, an unreadable one, or too few
            held-out prompts.
        PromptFileError: malformed lines, by number, or an unknown tag.
    """
    if problems := list(_unset_files(config)):
        raise ConfigError("the configuration", problems)
    trained = read_prompts(
        "data.train", _file_of(config, "train"), config.data.tags, _columns_of(config, "train")
    )
    if problems := list(_without_pictures(config, trained)):
        raise ConfigError("the configuration", problems)
    return Prompts(tuple(trained), load_held_out(config))


def _without_pictures(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Where pictures are trained: the first prompt with too few, or more than its group has members."""
    if not config.algorithm.trains_on_stored:
        return
    least, most = 1 + config.algorithm.compares_groups, config.rollout.group_size
    for prompt in prompts:
        if not least <= len(prompt.pictures) <= most:
            yield Problem(
                "data.train", f"{len(prompt.pictures)} pictures of {prompt.text!r}",
                f"{least} to {most}, rollout.group_size, with algorithm.name={config.algorithm.name}",
                "Name them in 'pictures', the best first, or give a folder of pictures with captions.",
            )  # fmt: skip
            return


def load_held_out(config: RunConfig) -> tuple[Prompt, ...]:
    """Read the held-out prompts alone. Raises as :func:`load_prompts`."""
    tags, wanted, test = config.data.tags, config.evaluation.prompts, config.data.test
    held_out = read_prompts("data.test", _file_of(config, "test"), tags, _columns_of(config, "test"))
    if wanted is not None and wanted > len(held_out):
        problem = Problem(
            "evaluation.prompts", str(wanted),
            f"at most {len(held_out)}, the held-out prompts of data.test={test}"
            + (f" with data.tags={list(tags)}" if tags else ""),
            "Lower it, or leave the key out to take them all.",
        )  # fmt: skip
        raise ConfigError("the configuration", [problem])
    return evenly_spaced(held_out, wanted)


def unset_keys(config: RunConfig) -> list[str]:
    """Which of ``data.train`` and ``data.test`` nobody set, and so are the testbed's."""
    return [f"data.{name}" for name in ("train", "test") if name not in config.data.model_fields_set]


def keys_to_set(config: RunConfig) -> list[str]:
    """Those of :func:`unset_keys` that have to be set: all, for other models than the testbeds."""
    return [] if config.model.path in TESTBEDS else unset_keys(config)


def _unset_files(config: RunConfig) -> Iterator[Problem]:
    for key in keys_to_set(config):
        yield Problem(
            key, "nothing", f"a file of prompts for model.path={config.model.path}",
            f"Set {key}=FILE (.txt: one prompt a line; .jsonl: one object a line; .csv, .tsv, .parquet, a "
            f"dataset's folder or hf:NAME: a column prompt), or {key}=testbed for the coloured shapes of the "
            "testbed.",
        )  # fmt: skip


def evenly_spaced(prompts: Sequence[Prompt], count: int | None) -> tuple[Prompt, ...]:
    """``count`` prompts spread over the file, in order; all if None or too few.

    Files are often sorted by tag, so the first few would share one.
    """
    kept = len(prompts) if count is None else min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // kept] for index in range(kept))


def read_prompts(
    key: str,
    path: Path,
    tags: Sequence[str] = (),
    columns: Columns = USUAL,
) -> list[Prompt]:
    """Prompts of the file configured as ``key``. Raises as load_prompts."""
    try:
        text = _text_of(key, path, columns)
    except (OSError, ValueError) as error:
        here = "" if path.is_absolute() else f" (relative to the current directory {Path.cwd()})"
        expected = (
            "readable prompts: a .txt, .jsonl, .csv, .tsv or .parquet file, a folder of pictures, or a "
            "dataset's folder or hf:NAME"
        )
        problem = Problem(key, f"{path}{here}", expected, f"{error}.")
        raise ConfigError("the configuration", [problem]) from None
    source = str(path / "metadata.jsonl" if _is_pictures(path) else path)
    column = PROMPT if _is_pictures(path) else columns.text
    prompts = parse_prompts(text, source, column=column, references=columns.references)
    _require_read(key, prompts)
    prompts = with_found_pictures(prompts, source, columns.kept)
    with under("data"):
        return with_tags(prompts, str(path), tags)


def _is_pictures(path: Path) -> bool:
    return path.is_dir() and not is_dataset(path)


def _text_of(key: str, path: Path, columns: Columns) -> str:
    """Raises OSError, or ValueError that says what is wrong."""
    if _is_pictures(path):
        return folder_text(path)
    split = key.rpartition(".")[2]
    return with_pairs(read_text(path, split, columns), columns.text)


_READ_NOWHERE = {
    "negative_prompt": "set rollout.negative_prompt, which is for all prompts",
    **{
        name: f"set data.reference_column={name} if it holds pictures that prompts are about"
        for name in ("image", "images", "media")
    },
    **dict.fromkeys(("video", "videos"), "leave it out: no family draws from videos"),
}
"""Keys of other trainers' prompts files, with what to do instead."""


def _require_read(key: str, prompts: Sequence[Prompt]) -> None:
    """Refuse what another trainer would train on. Raises :class:`ConfigError`."""
    counts = Counter(name for prompt in prompts for name in prompt.metadata if name in _READ_NOWHERE)
    problems = [
        Problem(
            key, f"{name!r} in {count} of its {len(prompts)} prompts", "only keys that are read",
            f"Instead, {_READ_NOWHERE[name]}; rename it if a reward of yours reads it.",
        )
        for name, count in counts.items()
    ]  # fmt: skip
    if problems:
        raise ConfigError("the configuration", problems)
