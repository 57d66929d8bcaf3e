"""A run of any family that is killed and resumed ends as if it had not been, to the bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from main_job import NFT, At, Job, clean_audit, outcome, run_process
from tests.contract.family_cases import CASES, TRAINED

from spotlight.registry import FAMILIES
from spotlight.testbed import TRAIN_PROMPTS

KILLS = (At("work training", 5), At("os.rename /checkpoints/latest"))
"""One per attempt: between two gradients of the second update, and within the checkpoint after it."""


@pytest.mark.slow  # four processes each; Qwen-Image's is in the first tier (test_resume.py)
@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, name: str, variant: int) -> None:
    family, case = FAMILIES.load(name), CASES[name]
    pipeline = tmp_path / "pipeline"
    family.tiny(pipeline, seed=variant, variant=variant)
    job = Job(tmp_path / "runs", pipeline)
    settings = [
        f"model.family={name}",
        f"model.max_text_tokens={case.max_text_tokens}",
        f"rollout.height={case.size.height}",
        f"rollout.width={case.size.width}",
        f"rollout.frames={case.size.frames}",
        "rollout.prompts_per_iteration=1",
        "rollout.true_cfg_scale=2.0",
        "iterations=2",
        "evaluation.prompts=1",
        "learner.micro_batch_size=1",
        *NFT,
    ]
    if family.reference_tokens:
        path = _with_references(tmp_path)
        settings += [f"data.train={path}", f"data.test={path}", "model.max_text_tokens=512"]
    if family.embedded_guidance is not None:
        settings.append(f"rollout.embedded_guidance={family.embedded_guidance}")
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


def _with_references(folder: Path) -> Path:
    """Prompts of the testbed, each about a picture."""
    picture = Path(__file__).parents[2] / "examples" / "prompts" / "pictures" / "red-circle.png"
    lines = [json.loads(line) for line in TRAIN_PROMPTS.read_text().splitlines()[:8]]
    path = folder / "edits.jsonl"
    path.write_text("\n".join(json.dumps({**line, "references": [str(picture)]}) for line in lines))
    return path
