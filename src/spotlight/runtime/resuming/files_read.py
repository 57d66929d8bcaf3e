"""The files whose content decides a run's numbers: a run goes on only with those that it began with.

Prompts and rewards are recorded in the ledger by what they are; here are the model's weights, and pictures
that prompts name. A checkpoint's header has a hash of each, under the key that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts
from spotlight.dry_run.model_plan import NotHere, planned_files
from spotlight.testbed import lora_path
from spotlight_files.file_contents import below, contents_of
from spotlight_files.hub_snapshot import cached_commit
from spotlight_files.pipeline_files import is_hub_id
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import at_home
from spotlight_rewards.base.prompts import Prompt

_WEIGHTS = ("*.safetensors", "*.json")


def files_read(config: RunConfig, prompts: Prompts) -> dict[str, str]:
    """Hashes of contents by key, of what is on this machine; of a hub's files, their commit."""
    found: dict[str, str] = {}
    pipeline = planned_files(config)
    if not isinstance(pipeline, NotHere) and pipeline.known is None:
        found["model.path"] = pipeline.contents()
    for key, given in (("model.transformer", config.model.transformer), ("model.lora", config.model.lora)):
        if given is not None and (content := _weights(lora_path(given))) is not None:
            found[key] = content
    for key, some in (("data.train", prompts.train), ("data.test", prompts.test)):
        if paths := _pictures(some):
            found[key] = contents_of(paths)
    return found


def require_same_files(before: Mapping[str, str], now: Mapping[str, str], config: RunConfig) -> None:
    """Raise StoreError for other contents than up to the checkpoint; pictures may be others where the command
    names the run."""
    for key in sorted(before.keys() & now.keys()):
        of_model = key.startswith("model.")
        if before[key] == now[key] or (config.names_run and not of_model):
            continue
        section, name = key.split(".")
        given, what = getattr(getattr(config, section), name), "weights" if of_model else "pictures"
        raise StoreError(
            f"{config.runs_dir / config.name}: {key} ({given}) holds other {what} than up to the checkpoint: "
            f"found {now[key][:12]}, expected {before[key][:12]}. Put back the files that the run began "
            "with, or start a run of another name."
        )


def _weights(given: str) -> str | None:
    path = at_home(given)
    if path.is_file():
        return contents_of(below(path.parent, [path]))
    if path.is_dir():
        return contents_of(below(path, (each for pattern in _WEIGHTS for each in path.rglob(pattern))))
    return cached_commit(given) if is_hub_id(given) else None


def _pictures(prompts: Iterable[Prompt]) -> dict[str, Path]:
    """By their order, since another machine may have them elsewhere."""
    named = dict.fromkeys(each for prompt in prompts for each in (*prompt.references, *prompt.pictures))
    return {str(number): path for number, each in enumerate(named) if (path := Path(each)).is_file()}
