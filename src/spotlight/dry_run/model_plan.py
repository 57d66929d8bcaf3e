"""Sizes of a pipeline's components, read from configuration files and safetensors headers; no weights, no
torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import TESTBED
from spotlight.data.section_names import under
from spotlight.models.family import ModelFamily
from spotlight.models.family_facts import Dimensions
from spotlight.models.media import MediaSize
from spotlight.models.model_errors import ModelError
from spotlight.models.pipeline_files import PipelineFiles, locate
from spotlight.registry import FAMILIES
from spotlight.testbed import PIPELINE_DIR


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """What the number of trained parameters depends on.

    Attributes:
        root: the pipeline directory.
        parameters: of the DiT.
        linears: (outputs, inputs) of the DiT's linear layers, by module name.
    """

    root: Path
    parameters: int
    linears: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ModelSizes(TransformerSizes):
    """What memory and time depend on.

    Attributes:
        dimensions: of the pipeline.
        video: whether the family makes videos.
        vae_parameters: of encoder and decoder.
        text_encoder_parameters: 0 if not downloaded yet.
    """

    dimensions: Dimensions
    video: bool
    vae_parameters: int
    text_encoder_parameters: int

    def tokens(self, size: MediaSize) -> int:
        """Tokens per sample. Raises ModelError if the model does not support the size."""
        with under("rollout"):
            self.dimensions.check_size(size, video=self.video)
        return self.dimensions.tokens(size)


@dataclass(frozen=True, slots=True)
class NotHere:
    """A hub model that is not sufficiently downloaded; ``remedy`` says how to get it."""

    hub_id: str
    remedy: str


def family_of(config: RunConfig) -> type[ModelFamily]:
    """The configured family."""
    return FAMILIES.load(config.model.family)


def read_sizes(config: RunConfig) -> ModelSizes | NotHere:
    """The configured pipeline's sizes.

    Raises:
        ModelError: missing, incomplete or another pipeline class.
    """
    files = _locate(config, ("transformer", "vae"))
    return files if isinstance(files, NotHere) else _sizes(files, family_of(config))


def read_transformer(config: RunConfig) -> TransformerSizes | NotHere:
    """As :func:`read_sizes`, for the DiT alone."""
    files = _locate(config, ("transformer",))
    return files if isinstance(files, NotHere) else _transformer(files)


def _locate(config: RunConfig, parts: Sequence[str]) -> PipelineFiles | NotHere:
    model, family = config.model, family_of(config)
    path = str(PIPELINE_DIR) if model.path == TESTBED else model.path
    if not Path(path).expanduser().exists() and path.count("/") == 1 and not path.startswith((".", "/", "~")):
        cached = _cached(path, model.revision, parts)
        if cached is None:
            return NotHere(
                path, f"hf download {path}" + (f" --revision {model.revision}" if model.revision else "")
            )
        return PipelineFiles(cached)
    return locate(
        path, revision=model.revision, pipeline_class=family.pipeline_class, components=family.components
    )


def _cached(hub_id: str, revision: str | None, parts: Sequence[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return root if all(_shapes(root / part) for part in parts) else None


def _transformer(files: PipelineFiles) -> TransformerSizes:
    shapes = _shapes(files.folder("transformer"))
    return TransformerSizes(
        root=files.root,
        parameters=_count(shapes),
        linears={
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        },
    )


def _sizes(files: PipelineFiles, family: type[ModelFamily]) -> ModelSizes:
    transformer = _transformer(files)
    return ModelSizes(
        transformer.root,
        transformer.parameters,
        transformer.linears,
        dimensions=family.read_dimensions(files),
        video=family.video,
        vae_parameters=_count(_shapes(files.folder("vae"))),
        text_encoder_parameters=sum(
            _count(_shapes(files.folder(name)))
            for name in family.components
            if name.startswith("text_encoder")
        ),
    )


def bind_targets(sizes: TransformerSizes, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers matched by LoRA targets (suffixes of module names), with (outputs, inputs).

    Raises:
        ModelError: a target that matches none.
    """
    bound: dict[str, tuple[int, int]] = {}
    for target in targets:
        hits = {
            name: shape
            for name, shape in sizes.linears.items()
            if name == target or name.endswith(f".{target}")
        }
        if not hits:
            ends = sorted({name.split(".", 2)[-1] for name in sizes.linears})
            near = difflib.get_close_matches(target, ends, n=4, cutoff=0.4) or ends[:4]
            raise ModelError(
                f"learner.lora.targets: {target!r} matches no linear layer of {sizes.root / 'transformer'}; "
                f"nearest: {', '.join(near)}. Correct it, or leave the key out."
            )
        bound |= hits
    return bound


def lora_parameters(bound: Mapping[str, tuple[int, int]], rank: int) -> int:
    """Parameters of one adapter: A is [rank, inputs], B is [outputs, rank]."""
    return sum(rank * (outputs + inputs) for outputs, inputs in bound.values())


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
