"""A killed rank of every family that splits its sequence: survivors finish its rollouts, which stay the same.

Qwen-Image's groups are tests/invariant/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.family_cases import CASES, PICTURES, TRAINED
from tests.invariant.group_ranks import ALL, Mishap, Model, Work, Workers, assert_same, kill_and_go_on

from spotlight.registry import FAMILIES

pytestmark = pytest.mark.slow  # four processes per family

SPLITTING = [
    (name, variant)
    for name, variant in TRAINED
    if name != "qwen-image" and FAMILIES.load(name).splits_sequence
]


UPRIGHT, LYING = (
    (str(Path(PICTURES[0]).with_name(name)),) for name in ("tree.png", "square-and-triangle.png")
)
"""Of equally many tokens in two shapes, which with text and picture divide among four ranks."""


@pytest.fixture(params=SPLITTING, ids=lambda each: f"{each[0]}-{each[1]}")
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Workers, Work]]:
    """Four workers with a small random pipeline, and three rollouts of prompts of unequal length."""
    name, variant = request.param
    family, case = FAMILIES.load(name), CASES[name]
    family.tiny(tmp_path / "pipeline", seed=variant, variant=variant)
    model = Model(tmp_path / "pipeline", tmp_path / "cache", name, case.max_text_tokens)
    size = case.size.height, case.size.width, case.size.frames
    work = Work((0, 1, 2), size=size, embedded=family.embedded_guidance)
    if family.references_max > 1:  # of their real size here: 1,024 tokens each
        model = replace(model, max_text_tokens=512)
        work = replace(work, guidance=2.0, references=(PICTURES[:1], PICTURES, PICTURES[:1]))
    elif family.references_max:
        work = replace(work, guidance=2.0, references=(UPRIGHT, LYING, UPRIGHT))
    workers = Workers(model, count=4)
    yield workers, work
    workers.close()


def test_degrees_agree_and_survivors_of_a_killed_rank_finish_its_rollouts(
    group: tuple[Workers, Work],
) -> None:
    workers, work = group
    undisturbed = {name: latents for name, (_, latents) in workers.denoise(work, "w3").items()}
    for members in (ALL[:2], ALL):
        workers.form(*members)
        assert_same(workers.denoise(work, *members), undisturbed)
    forwards = len(set(work.references)) if FAMILIES.load(workers.model.family).reference_tokens else 1
    passes = 2 if work.guidance > 1 else 1
    kill_and_go_on(workers, undisturbed, "w2", Mishap("kill", 2, 1, passes * forwards), work)
