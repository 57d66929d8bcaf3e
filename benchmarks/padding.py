"""Padded text and prompts per forward, with samples dealt to ranks in turn and as neighbours.

    python -m benchmarks.padding [CONFIG.yaml [KEY=VALUE ...]] [--ranks 8] [--json FILE]

Counts the first iteration's forwards of rollouts and training. A forward of several prompts pads all to the
longest, and needs a mask; one of a single prompt needs neither. Tokens of prompts are estimated from their
words, as ``--dry-run`` does; nothing is downloaded or loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks._measure import wide_console
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.registry import FAMILIES
from spotlight.training.batching.redistribute import neighbours

Deal = Callable[[Sequence[int], int, int], Sequence[int]]


def in_turn(items: Sequence[int], rank: int, world: int) -> Sequence[int]:
    """Every ``world``-th item."""
    return items[rank::world]


@dataclass(frozen=True, slots=True)
class Padding:
    """Of all ranks' forwards.

    Attributes:
        prompts: in a forward, on average.
        masked: share of forwards of prompts of unequal length.
        padded: share of text tokens that are padding.
    """

    prompts: float
    masked: float
    padded: float


def padding(forwards: Sequence[Sequence[int]], tokens: Sequence[int], group: int) -> Padding:
    """Of forwards of samples, ``group`` consecutive ones of which have prompt after prompt of ``tokens``."""
    prompts = [{sample // group for sample in forward} for forward in forwards]
    longest = [max(tokens[prompt] for prompt in each) for each in prompts]
    real = sum(tokens[sample // group] for forward in forwards for sample in forward)
    run = sum(most * len(forward) for most, forward in zip(longest, forwards, strict=True))
    unequal = sum(len({tokens[prompt] for prompt in each}) > 1 for each in prompts)
    return Padding(sum(map(len, prompts)) / len(prompts), unequal / len(prompts), 1 - real / run)


def forwards_of(samples: int, block: int, at_once: int, ranks: int, deal: Deal) -> list[Sequence[int]]:
    """Each rank's forwards of at most ``at_once``, when it is dealt its part of ``block`` after ``block``."""
    found: list[Sequence[int]] = []
    for start in range(0, samples, block):
        items = range(start, min(start + block, samples))
        for rank in range(ranks):
            mine = deal(items, rank, ranks)
            found += [mine[at : at + at_once] for at in range(0, len(mine), at_once)]
    return found


def measure(config: RunConfig, ranks: int) -> dict[str, dict[str, Padding]]:
    """By phase and way of dealing."""
    rollout, family = config.rollout, FAMILIES.load(config.model.family)
    prompts = load_prompts(config).train[: rollout.prompts_per_iteration]
    most = config.model.max_text_tokens
    tokens = [family.planned_text_tokens(len(prompt.text.split()), most) for prompt in prompts]
    samples = len(prompts) * rollout.group_size
    phases = {"rollouts": rollout.batch_size, "training": config.learner.micro_batch_size}
    return {
        phase: {
            name: padding(forwards_of(samples, size * ranks, size, ranks, deal), tokens, rollout.group_size)
            for name, deal in (("in turn", in_turn), ("neighbours", neighbours))
        }
        for phase, size in phases.items()
    }


def main() -> None:
    """Print and optionally store the table."""
    parser = argparse.ArgumentParser(description="Padding by the way samples are dealt to ranks")
    parser.add_argument("config", nargs="?", type=Path, default=Path("examples/qwen-image-ocr-lora.yaml"))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = measure(load_config(arguments.config, arguments.overrides), arguments.ranks)
    table = Table("phase", "dealt", "prompts a forward", "forwards with a mask", "padded text")
    for phase, ways in measured.items():
        for name, found in ways.items():
            table.add_row(phase, name, f"{found.prompts:.2f}", f"{found.masked:.0%}", f"{found.padded:.1%}")
    wide_console().print(f"{arguments.config}, {arguments.ranks} ranks")
    wide_console().print(table)
    if arguments.json is not None:
        phases = {
            phase: {name: asdict(found) for name, found in ways.items()} for phase, ways in measured.items()
        }
        arguments.json.write_text(
            json.dumps({"ranks": arguments.ranks, **phases}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
