"""The versions that a checkpoint was written with, and what others may do to the rest of a run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import spotlight
from spotlight.store.manifest import CheckpointHeader

_MAY_DIFFER = {
    "torch": "kernels, and with them the rounding of every forward and update",
    "diffusers": "the model's forward, and how its weights are read",
    "transformers": "text encoders, and with them the embeddings of prompts that are not in cache_dir",
    "spotlight-rl": "anything that CHANGELOG.md names",
}


def library_versions() -> dict[str, str]:
    """Of the libraries that a run's numbers come from."""
    return {name: version(name) for name in ("torch", "diffusers", "transformers")}


def version_note(then: CheckpointHeader, now: Mapping[str, str]) -> str | None:
    """What differs from the versions that a checkpoint names, of those that it does name."""
    named = {**then.versions, "spotlight-rl": then.package_version}
    current = {**now, "spotlight-rl": spotlight.__version__}
    changed = [
        f"{name} {named[name]} then, {current[name]} now ({may_differ} may differ)"
        for name, may_differ in _MAY_DIFFER.items()
        if name in named and named[name] != current[name]
    ]
    if not changed:
        return None
    return (
        f"other versions than those that wrote the checkpoint: {'; '.join(changed)}. The run goes on, but "
        "need not equal one that was not interrupted; for that, install the former versions"
    )
