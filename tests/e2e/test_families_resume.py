"""A run of any family that is killed and resumed ends as if it had not been, to the bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from family_job import family_job
from main_job import NFT, At, clean_audit, outcome, run_process
from tests.contract.family_cases import TRAINED

KILLS = (At("work training", 5), At("os.rename /checkpoints/latest"))
"""One per attempt: between two gradients of the second update, and within the checkpoint after it."""
FULL = ("learner.mode=full", "learner.learning_rate=0.001")
AWM = ("algorithm.name=awm", "algorithm.train_timesteps=2", *FULL)
FLOW_GRPO_FAST = (
    "algorithm.name=flow-grpo-fast",
    "rollout.sampler=flow-sde",
    "rollout.sde_window={kind: random, size: 1}",
    *FULL,
)
WAYS = [
    pytest.param(name, variant, way, id=f"{name}-{variant}-{way[0].partition('=')[2]}")
    for number, (name, variant) in enumerate(TRAINED)
    for way in (NFT, FLOW_GRPO_FAST if number % 2 else AWM)
]
"""A LoRA by DiffusionNFT, and all weights by the two others in turn."""
QUANTISED = [
    pytest.param(name, 0, (*NFT, f"model.quantize={kind}"), id=f"{name}-{kind}")
    for name, kind in (("qwen-image", "nf4"), ("z-image", "int8"))
]


@pytest.mark.slow  # four processes each; Qwen-Image's is in the first tier (test_resume.py)
@pytest.mark.parametrize(("name", "variant", "way"), [*WAYS, *QUANTISED])
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, name: str, variant: int, way: tuple[str, ...]
) -> None:
    job, given = family_job(tmp_path, name, variant)
    settings = [*given, *way]
    straight = run_process(job.arguments("straight", *settings), answer=tmp_path / "straight.json")
    assert straight.finished, straight
    arguments = job.arguments("killed", *settings)
    for kill in KILLS:
        ended = run_process(arguments, kill, answer=tmp_path / "killed.json")
        assert ended.exit_code == -signal.SIGKILL, (kill, ended, straight.moments)
    ended = run_process(arguments, answer=tmp_path / "killed.json")
    assert ended.finished, ended
    assert outcome(job.root / "killed") == outcome(job.root / "straight")
    clean_audit(job.root / "killed")
