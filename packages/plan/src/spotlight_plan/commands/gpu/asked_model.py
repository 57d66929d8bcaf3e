"""The model that ``spotlight doctor --gpu`` is asked about: a published one, or a configuration's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spotlight.config.load import build_config, load_config
from spotlight.config.preset import preset_names
from spotlight.config.schema import RunConfig
from spotlight.data.media_size import media_size
from spotlight.data.section_names import under
from spotlight.dry_run.memory_plan import timesteps_per_pass
from spotlight.dry_run.model_plan import ModelSizes, NotHere, family_of, planned_files, read_sizes
from spotlight.registry import FAMILIES
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_rewards.base.errors import did_you_mean

if TYPE_CHECKING:
    from spotlight.models.family import ModelFamily

SIDE_PX = 512
WORDS = 29
"""Of a prompt: 64 tokens where they are not padded."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A configuration, and what is known of its model without weights."""

    config: RunConfig
    files: PipelineFiles
    sizes: ModelSizes

    @property
    def family(self) -> type[ModelFamily]:
        return family_of(self.config)

    @property
    def rows(self) -> int:
        """Of a pass in training."""
        return self.config.learner.micro_batch_size * timesteps_per_pass(self.config)

    @property
    def text_tokens(self) -> int:
        return self.family.planned_text_tokens(WORDS, self.config.model.max_text_tokens)

    @property
    def planned_tokens(self) -> int:
        """Those of a reference picture included."""
        return self.text_tokens + self.family.reference_tokens


def find_model(asked: str, side_px: int | None) -> AskedModel:
    """Of a family, a published model's hub id, a preset or a configuration file.

    Args:
        side_px: height and width; None: the configuration's, of a family :data:`SIDE_PX`.

    Raises:
        ConfigError: the configuration is wrong.
        ModelError: it is none of these, the model is not here or unusable, or the size does not fit it.
    """
    if asked in preset_names():
        config = load_config(None, [f"like={asked}"])
    elif asked not in FAMILIES and Path(asked).is_file():
        config = load_config(Path(asked))
    elif (published := _published(asked)) is not None:
        config = _usual(*published)
    else:
        known = [*FAMILIES, *preset_names()]
        raise ModelError(
            f"the model is {asked!r}; expected a configuration file, the hub id of a published model "
            f"(docs/families.md), or one of {', '.join(known)}. "
            + did_you_mean(asked, known, "Leave it out for qwen-image.")
        )
    if side_px is not None:
        sized = config.rollout.model_copy(update={"height": side_px, "width": side_px})
        config = config.model_copy(update={"rollout": sized})
    files, sizes = planned_files(config), read_sizes(config)
    if isinstance(files, NotHere) or isinstance(sizes, NotHere):
        remedy = files.remedy if isinstance(files, NotHere) else sizes.remedy
        raise ModelError(
            f"model.path is {config.model.path}, which is not on this machine, and its sizes are not known: "
            f"{remedy}, or name a family"
        )
    with under("rollout"):
        sizes.dimensions.check_size(media_size(config.rollout), video=sizes.video)
    return AskedModel(config, files, sizes)


def _published(asked: str) -> tuple[str, str] | None:
    """A family and one of its published models, of which a family's own name means the first."""
    if asked in FAMILIES:
        return asked, FAMILIES.load(asked).tiny_models[0].model
    return next(((name, asked) for name in FAMILIES if asked in FAMILIES.load(name).published), None)


def _usual(name: str, model: str) -> RunConfig:
    """LoRA in bfloat16."""
    family = FAMILIES.load(name)
    tree = {
        "model": {"family": name, "path": model, "dtype": "bfloat16"},
        "rollout": {
            "height": SIDE_PX,
            "width": SIDE_PX,
            "frames": 1 + family.usual_frames_per_latent if family.video else 1,
            "batch_size": 16,
        },
        "learner": {
            "mode": "lora",
            "lora": {"rank": 64, "alpha": 128.0},
            "autocast": "bfloat16",
            "micro_batch_size": 4,
        },
    }
    return build_config(tree, f"the usual one of {name}")
