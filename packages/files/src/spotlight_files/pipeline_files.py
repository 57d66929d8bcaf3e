"""Locates and validates a diffusers pipeline directory before anything is loaded from it.

Invariant: :func:`locate` returns only pipelines of the expected class with every requested component, whose
weights are safetensors with valid headers. Pickled weights are neither downloaded nor read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from spotlight_files.file_contents import add_file, below, contents_of
from spotlight_files.model_errors import ModelError, looking
from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.files import at_home, open_regular, read_regular

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Weights that lie beside the safetensors in some hub models; never downloaded."""
_JSON_BYTES_MAX = 64 * 2**20
"""Of a configuration, or an index of weights."""


@dataclass(frozen=True, slots=True)
class PipelineComponent:
    """Requirements on one folder of a pipeline.

    Attributes:
        classes: names accepted in ``model_index.json``, the usual one first.
        weights: whether it has weights.
        lazy: whether a hub model's weights are only downloaded by :meth:`PipelineFiles.fetch`.
        optional: whether a pipeline may lack it.
        load: makes a tokenizer from its folder, where not by its class's ``from_pretrained``.
    """

    classes: tuple[str, ...]
    weights: bool
    lazy: bool = False
    optional: bool = False
    load: Callable[[Path], object] | None = None


@dataclass(frozen=True, slots=True)
class PipelineFiles:
    """A pipeline directory on this machine.

    Attributes:
        root: the directory (hub models: the snapshot).
        hub_id: ``owner/name`` if it came from the hub.
        commit: the hub's commit, which fixes the content.
        known: configurations by component where nothing is on disk (published models); ``model_index``: its
            other values.
    """

    root: Path
    hub_id: str | None = None
    commit: str | None = None
    known: Mapping[str, Mapping[str, object]] | None = None

    def folder(self, component: str) -> Path:
        return self.root / component

    def config(self, component: str, name: str = "config.json") -> dict[str, object]:
        """A component's configuration file. ModelError if missing or not JSON."""
        if self.known is not None and component in self.known:
            return dict(self.known[component])
        return read_json(self.folder(component) / name)

    def component_class(self, component: str) -> str | None:
        """The class that ``model_index.json`` names for a component; None if the pipeline lacks it."""
        if self.known is not None:
            found = self.known.get(component, {}).get("_class_name")
        else:
            entry = read_json(self.root / "model_index.json").get(component)
            found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        return found if isinstance(found, str) else None

    def setting(self, key: str) -> object:
        """Another value of ``model_index.json``; None if it lacks the key."""
        if self.known is not None:
            return self.known.get("model_index", {}).get(key)
        return read_json(self.root / "model_index.json").get(key)

    def fetch(self, component: str) -> None:
        """Download a component's weights if necessary, and check them."""
        if self.hub_id is not None:
            download(self.hub_id, self.commit, [f"{component}/*"])
        check_weights(self.folder(component))

    def identity(self, *components: str) -> str:
        """A hash of the content of these components."""
        digest = hashlib.sha256()
        if self.commit is not None:
            digest.update(f"{self.hub_id}@{self.commit}".encode())
            return digest.hexdigest()
        for component in components:
            for path in sorted(p for p in self.folder(component).rglob("*") if p.is_file()):
                digest.update(os.fsencode(path.relative_to(self.root)) + b"\0")
                # A copied model's prompts are embedded again, which costs less than reading it whole.
                add_file(path, digest, times=True)
        return digest.hexdigest()

    def contents(self) -> str:
        """The hub's commit, or a hash of all components, which is that of a copy, too."""
        if self.commit is not None:
            return self.commit
        # Hidden folders are no components: `hf download --local-dir` writes into .cache each time.
        found = [self.root / "model_index.json", *self.root.glob("[!.]*/**/*")]
        return contents_of(below(self.root, found))


def locate(
    path: str | Path,
    revision: str | None,
    pipeline_classes: Sequence[str],
    components: Mapping[str, PipelineComponent],
    remedy: Callable[[object], str] = lambda _: "Name another path",
) -> PipelineFiles:
    """Find a pipeline directory, or download a hub id, and check its content.

    Args:
        path: a directory, or a hub id ``owner/name``.
        revision: branch, tag or commit of a hub id; None: its main branch.
        pipeline_classes: a ``_class_name`` expected in ``model_index.json``, the usual one first.
        components: requirements per folder.
        remedy: what to do about a pipeline of another class, by its ``_class_name``.

    Raises:
        ModelError: nothing found, another pipeline, a missing component, bad weights, or an unreachable hub.
    """
    with looking("model.path", path):
        files = _local(at_home(path), revision)
    files = files or _from_hub(str(path), revision, components)
    index_path = files.root / "model_index.json"
    if not index_path.is_file():
        raise ModelError(
            f"{files.root} has no model_index.json: expected a diffusers pipeline directory (as written by "
            f"{pipeline_classes[0]}.save_pretrained), found {_listing(files.root)}"
        )
    index = read_json(index_path)
    found_class = index.get("_class_name")
    if found_class not in pipeline_classes:
        raise ModelError(
            f"{index_path} describes a {found_class}; expected a {pipeline_classes[0]}. {remedy(found_class)}"
        )
    for name, component in components.items():
        _check_component(files, name, component)
    return files


def _local(root: Path, revision: str | None) -> PipelineFiles | None:
    if root.is_file():
        raise ModelError(f"{root} is a file; expected a pipeline directory, the one with model_index.json")
    if not root.is_dir():
        return None
    if revision is not None:
        raise ModelError(
            f"revision {revision!r} is given for the local directory {root}; revisions belong to hub ids: "
            "leave it out"
        )
    return PipelineFiles(root.resolve())


def _from_hub(name: str, revision: str | None, components: Mapping[str, PipelineComponent]) -> PipelineFiles:
    if not is_hub_id(name):
        absolute = at_home(name).is_absolute()
        here = "" if absolute else f" (relative to the current directory {Path.cwd()})"
        raise ModelError(
            f"model directory {name} does not exist{here}: give the path of a diffusers pipeline directory "
            "(the one with model_index.json) or a hub id such as Qwen/Qwen-Image"
        )
    root = download(name, revision, hub_patterns(components))
    return PipelineFiles(root, name, root.name)


def is_hub_id(name: str) -> bool:
    """Whether it has the form ``owner/name``, as the hub allows it."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is None:
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_patterns(components: Mapping[str, PipelineComponent]) -> list[str]:
    """Files of a hub model that :func:`locate` downloads, but for those of ``PICKLED``."""
    eager = [f"{folder}/*" for folder, component in components.items() if not component.lazy]
    lazy = [folder for folder, component in components.items() if component.lazy]
    small = [f"{folder}/*.{ending}" for folder in lazy for ending in ("json", "txt", "jinja")]
    return ["model_index.json", *eager, *small]


def download(hub_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Files of a hub model, into the hub's cache; returns the snapshot. Raises :class:`ModelError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(PICKLED)
            )
        )
    except GatedRepoError as error:
        raise ModelError(f"hub model {named} is gated: accept its terms, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{hub_id!r} is neither a directory here nor a model on the hub (or it is private: set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"hub model {hub_id} has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{hub_id!r} is no directory here, and as a hub id it is neither in the local hub cache nor "
            f"reachable ({type(error).__name__}): check the path, or the network and HF_HUB_OFFLINE, or "
            f"download it elsewhere (hf download {hub_id}) and give the directory"
        ) from error


def _check_component(files: PipelineFiles, name: str, component: PipelineComponent) -> None:
    folder, expected = files.folder(name), component.classes[0]
    found = files.component_class(name)
    if found is None and component.optional:
        return
    if found is None or not folder.is_dir():
        where = "is not named in model_index.json" if folder.is_dir() else "is missing"
        raise ModelError(
            f"{files.root}: component {name!r} ({expected}) {where}; found {_listing(files.root)}"
        )
    if found not in component.classes:
        raise ModelError(f"{files.root}: component {name!r} is a {found}; expected a {expected}")
    if component.weights and not (component.lazy and files.hub_id is not None):
        check_weights(folder)


def check_weights(folder: Path) -> None:
    """Read a component's config.json and every safetensors header.

    Raises:
        ModelError: no configuration or weights, a truncated or invalid file, or see :func:`weight_files`.
    """
    read_json(folder / "config.json")
    if not weight_files(folder):
        raise ModelError(f"{folder} has no *.safetensors weights; found {_listing(folder)}")
    for file in folder.glob("*.safetensors"):
        _tensor_names(file)


def shards_of(source: Path, key: str) -> list[Path]:
    """The files of weights that are given as a directory or a file. Raises ModelError if there are none."""
    with looking(key, source):
        shards = weight_files(source, key) if source.is_dir() else [source]
        if not shards or not all(shard.is_file() for shard in shards):
            raise ModelError(f"{key}: {source} is neither a .safetensors file nor a directory with any")
    return shards


def weight_files(folder: Path, key: str = "model.path") -> list[Path]:
    """A component's safetensors files; variants, as ``*.fp16.safetensors``, may lie beside them.

    Args:
        key: configuration key that names the folder, for errors.

    Raises:
        ModelError: a file that the index names is missing, one lies beside those that it names, or two hold
            the same tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    files = [file for file in files if "." not in file.stem] or files
    for index in folder.glob("*.safetensors.index.json"):
        found = read_json(index).get("weight_map")
        named = sorted({str(name) for name in found.values()}) if isinstance(found, dict) else []
        missing = [name for name in named if not os.path.isfile(folder / name)]  # noqa: PTH113 - as any text
        if missing:
            raise ModelError(
                f"{key}: {folder}: {len(missing)} of {len(named)} weight files named in {index.name} are "
                f"missing, first {missing[0]}: copy or download it again"
            )
        others = [file.name for file in files if file.name not in named]
        if others:
            raise ModelError(
                f"{key}: {folder} has {', '.join(others)} beside the {len(named)} weight files that "
                f"{index.name} names; expected only those: remove what is not of this model"
            )
    holders: dict[str, Path] = {}
    for file in files if len(files) > 1 else ():
        for name in _tensor_names(file):
            if (other := holders.setdefault(name, file)) != file:
                raise ModelError(
                    f"{key}: {folder}: {other.name} and {file.name} both have {name!r}; expected each tensor "
                    "once: remove the file that is not of this model"
                )
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size} bytes" if is_there(path) else "a link to a file that is gone"
        raise ModelError(f"{path} ({size}) is cut or corrupt ({error}): copy or download it again") from error


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. Raises :class:`ModelError`."""
    try:
        value = json.loads(read_regular(path, _JSON_BYTES_MAX))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; found {_listing(path.parent)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such directory"
    return ", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())) or "nothing"


def is_denoiser(component: str) -> bool:
    """Whether a component is none of the tokenizers and text encoders."""
    return component.startswith("transformer") or component in ("vae", "scheduler")


def transformer_names(components: Mapping[str, PipelineComponent]) -> list[str]:
    return [name for name in components if name.startswith("transformer")]


def without_transformer_weights(
    components: Mapping[str, PipelineComponent],
) -> Mapping[str, PipelineComponent]:
    """Components of which the transformers' weights are not fetched."""
    bare = {
        name: replace(components[name], weights=False, lazy=True) for name in transformer_names(components)
    }
    return {**components, **bare}
