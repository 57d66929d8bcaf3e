"""Sizes of a pipeline's components, read from configuration files and safetensors headers; no weights, no
torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from spotlight.config.schema import RunConfig
from spotlight.data.section_names import under
from spotlight.models.family_facts import Dimensions, target_pattern
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.testbed import pipeline_directory
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles, check_weights, is_hub_id
from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.files import at_home

if TYPE_CHECKING:
    from spotlight.models.family import ModelFamily


_OF_A_BLOCK = re.compile(r"\.\d+\.")


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

    @property
    def text_width(self) -> int:
        """Most values of a text token as the DiT takes it: the widest input outside blocks, if any.

        Exact for most families, at most 1.5 times as many for the others.
        """
        outside = [inputs for name, (_, inputs) in self.linears.items() if not _OF_A_BLOCK.search(name)]
        return max(outside or (inputs for _, inputs in self.linears.values()))


@dataclass(frozen=True, slots=True)
class ModelSizes(TransformerSizes):
    """What memory and time depend on.

    Attributes:
        dimensions: of the pipeline.
        video: whether the family makes videos.
        vae_parameters: of encoder and decoder.
        text_encoder_parameters: 0 if not downloaded yet.
        remedy: how to get the model, if only its published configuration is known here.
    """

    dimensions: Dimensions
    video: bool
    vae_parameters: int
    text_encoder_parameters: int
    remedy: str = ""

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
    return FAMILIES.load(config.model.family)


def read_sizes(config: RunConfig) -> ModelSizes | NotHere:
    """The configured pipeline's sizes.

    Raises:
        ModelError: missing, incomplete or another pipeline class.
    """
    family, files = family_of(config), planned_files(config)
    if isinstance(files, NotHere):
        return files
    transformer = _transformer(files, family)
    if files.known is None:
        encoders = (name for name in family.components if name.startswith("text_encoder"))
        text_parameters, remedy = sum(_count(_shapes(files, name)) for name in encoders), ""
    else:
        text_parameters = int(family.published[config.model.path].text_parameters)
        remedy = _download_command(config.model.path, None)
    return ModelSizes(
        transformer.root,
        transformer.parameters,
        transformer.linears,
        dimensions=family.read_dimensions(files),
        video=family.video,
        vae_parameters=_count(_shapes(files, "vae")),
        text_encoder_parameters=text_parameters,
        remedy=remedy,
    )


def planned_files(config: RunConfig) -> PipelineFiles | NotHere:
    """The configured pipeline's files; of a published model that is not here, its known configurations.

    Raises:
        ModelError: see :func:`read_sizes`.
    """
    files = _locate(config, ("vae",))
    if not isinstance(files, NotHere) or config.model.revision is not None:
        return files
    published = family_of(config).published.get(files.hub_id)
    if published is None:
        return files
    known = {**published.configs, "model_index": published.settings}
    return PipelineFiles(Path(files.hub_id), files.hub_id, known=known)


def read_transformer(config: RunConfig) -> TransformerSizes | NotHere:
    """As :func:`read_sizes`, for the DiT alone."""
    files = _locate(config, ())
    return files if isinstance(files, NotHere) else _transformer(files, family_of(config))


def _locate(config: RunConfig, besides: Sequence[str]) -> PipelineFiles | NotHere:
    """The pipeline's files; a hub model counts as here with all its transformers and ``besides``."""
    model, family = config.model, family_of(config)
    path = pipeline_directory(model.path)
    if not is_there(at_home(path)) and is_hub_id(path):
        _require_family(path, family)
        folder = downloaded(path, model.revision)
        if folder is None or not _complete(cached := PipelineFiles(folder), family, besides):
            return NotHere(path, _download_command(path, model.revision))
        return cached
    return family.locate(path, model.revision)


def _require_family(hub_id: str, family: type[ModelFamily]) -> None:
    if hub_id in family.published:
        return
    for name in FAMILIES.built_in:
        other = FAMILIES.load(name)
        if hub_id in other.published:
            raise ModelError(
                f"model.path={hub_id} is a {other.pipeline_class}; expected a {family.pipeline_class}. "
                f"Set model.family={name}, or name another model.path"
            )


def _download_command(hub_id: str, revision: str | None) -> str:
    return f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")


def downloaded(hub_id: str, revision: str | None = None) -> Path | None:
    """Where a model of the hub is, if it was downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _complete(files: PipelineFiles, family: type[ModelFamily], besides: Sequence[str]) -> bool:
    """Whether every transformer that the pipeline names, and ``besides``, is wholly downloaded."""
    try:
        for part in (*family.transformers(files), *besides):
            check_weights(files.folder(part))
    except ModelError:
        return False
    return "transformer" in family.transformers(files)


def _transformer(files: PipelineFiles, family: type[ModelFamily]) -> TransformerSizes:
    shapes = _together({name: _shapes(files, name) for name in family.transformers(files)})
    return TransformerSizes(files.root, _count(shapes), _linears(shapes))


def _together(parts: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Mapping[str, tuple[int, ...]]:
    """Shapes of one transformer, or of several under their component's names, as in ``Experts``."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return {f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes.items()}


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def adapted_layers(config: RunConfig, sizes: TransformerSizes) -> dict[str, tuple[int, int]]:
    """:func:`bind_targets` of the configured targets, by default the family's."""
    targets = config.learner.lora.targets
    return bind_targets(sizes, family_of(config).lora_targets if targets is None else targets)


def bind_targets(sizes: TransformerSizes, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers matched by LoRA targets (suffixes of module names), with (outputs, inputs).

    Raises:
        ModelError: a target that matches none.
    """
    bound: dict[str, tuple[int, int]] = {}
    for target in targets:
        hits = {
            name: shape for name, shape in sizes.linears.items() if re.fullmatch(target_pattern(target), name)
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


def _shapes(files: PipelineFiles, component: str) -> Mapping[str, tuple[int, ...]]:
    """By the headers of the files, or of a published model that is not here by its configuration."""
    if files.known is not None:
        # Imported here: the disk check of every run imports this module, and needs no diffusers.
        from spotlight.models.skeleton import shapes_of

        return shapes_of(files.config(component))
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in sorted(files.folder(component).glob("*.safetensors")):
        shapes |= shapes_in(shard)
    return shapes


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a file of safetensors. Raises OSError or SafetensorError."""
    with safe_open(file, framework="numpy") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
