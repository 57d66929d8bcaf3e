"""A job of any model family on its small random pipeline, and its overrides."""

from __future__ import annotations

import json
from pathlib import Path

from main_job import Job
from tests.contract.family_cases import CASES

from spotlight.registry import FAMILIES
from spotlight.testbed import TRAIN_PROMPTS


def family_job(folder: Path, name: str, variant: int) -> tuple[Job, list[str]]:
    """The job, whose pipeline is written into ``folder``, and overrides with little work."""
    family, case = FAMILIES.load(name), CASES[name]
    family.tiny(folder / "pipeline", seed=variant, variant=variant)
    settings = [
        f"model.family={name}",
        f"model.max_text_tokens={case.max_text_tokens}",
        f"rollout.height={case.size.height}",
        f"rollout.width={case.size.width}",
        f"rollout.frames={case.size.frames}",
        "rollout.prompts_per_iteration=1",
        "iterations=2",
        "evaluation.prompts=1",
        "learner.micro_batch_size=1",
    ]
    if family.references_max:
        path = _with_references(folder)
        settings += [f"data.train={path}", f"data.test={path}", "model.max_text_tokens=512"]
    if family.guidance_argument is not None:
        settings.append("rollout.true_cfg_scale=2.0")
    if family.embedded_guidance is not None:
        settings.append(f"rollout.embedded_guidance={family.embedded_guidance}")
    return Job(folder / "runs", folder / "pipeline"), settings


def _with_references(folder: Path) -> Path:
    """Prompts of the testbed, each about a picture."""
    picture = Path(__file__).parents[2] / "examples" / "prompts" / "pictures" / "red-circle.png"
    lines = [json.loads(line) for line in TRAIN_PROMPTS.read_text().splitlines()[:8]]
    path = folder / "edits.jsonl"
    path.write_text("\n".join(json.dumps({**line, "references": [str(picture)]}) for line in lines))
    return path
