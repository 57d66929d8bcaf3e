"""Whether a model can do what a configuration asks, judged from the model's configuration files alone.

The one place of these refusals: the dry run asks here, and every run before it reads weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts
from spotlight.data.media_size import media_size
from spotlight.data.section_names import under
from spotlight.dry_run.model_plan import NotHere, family_of, planned_files
from spotlight.testbed import lora_path
from spotlight_files.model_errors import ModelError, looking
from spotlight_files.pipeline_files import PipelineFiles, is_hub_id, shards_of
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompts import Prompt


def require_model(config: RunConfig) -> None:
    """:func:`require_supported` of the configured model, as far as it is known here, and the files of its
    ``transformer`` and ``lora``; a hub's are looked up when they are loaded."""
    files = planned_files(config)
    require_supported(config, None if isinstance(files, NotHere) else files)
    if isinstance(files, NotHere):
        return
    from spotlight.models.shared.transformer_files import weight_sources
    from spotlight_files.lora_file import lora_file_of, lora_of

    family = family_of(config)
    names = family.transformers(files)
    if config.model.transformer is not None:
        weights = weight_sources(files, names, config.model.transformer)
        for source in weights.sources.values():
            shards_of(source, weights.key)
    if config.model.lora is None:
        return
    lora = lora_path(config.model.lora)
    with looking("model.lora", lora):
        if Path(lora).is_dir() or not is_hub_id(lora):
            for name in names:
                lora_file_of(lora_of(lora, name))


def require_supported(config: RunConfig, files: PipelineFiles | None) -> None:
    """Refuse what the configuration asks for and the model cannot do.

    Args:
        files: the model's; None: unknown so far, so that only its family's facts are checked.

    Raises:
        ModelError: text limit, size, guidance, number of steps or sequence-parallel degree.
        ConfigError: step cache.
    """
    family = family_of(config)
    with under("model"):
        family.check_text_limit(config.model.max_text_tokens)
    _require_step_cache(config, files)
    if files is None:
        return
    dimensions, rollout = family.read_dimensions(files), config.rollout
    size = media_size(rollout)
    with under("rollout"):
        dimensions.check_size(size, video=family.video)
        family.check_guidance(files, rollout.true_cfg_scale)
        family.check_steps(files, rollout.steps)
    with under("evaluation"):
        family.check_steps(files, config.evaluation.steps)
    if (exploration := config.exploration) is not None:
        section, _, name = exploration.steps_key.rpartition(".")
        with under(section):
            for steps in config.preview_steps:
                family.check_steps(files, steps, name)
    with under("fleet.sequence_parallel"):
        asked = config.fleet.sequence_parallel
        for degree in asked.degrees:
            split = asked.split(degree)
            if dimensions.heads % split:
                raise ModelError(
                    f"degrees has {degree}; expected divisors of {dimensions.heads}, the transformer's "
                    f"attention heads{', times 2' if asked.guidance else ''}. Leave it out"
                )
            family.check_split(split, dimensions.tokens(size), config.model.max_text_tokens)


def require_prompts(config: RunConfig, prompts: Prompts) -> None:
    """:func:`require_references` of every prompt, and degrees that split samples with each reference.

    Raises:
        ModelError: see above; of degrees only where the model's files are known here.
    """
    every = (*prompts.train, *prompts.test)
    first: dict[int, Prompt] = {}  # of each number of references: one tells of all
    for prompt in every:
        first.setdefault(len(prompt.references), prompt)
    for prompt in first.values():
        require_references(config, prompt.references, prompt.text)
    asked, files, family = config.fleet.sequence_parallel, planned_files(config), family_of(config)
    splits = [split for degree in asked.degrees if (split := asked.split(degree)) > 1]
    if isinstance(files, NotHere) or not splits:
        return
    tokens, text = (
        family.read_dimensions(files).tokens(media_size(config.rollout)),
        config.model.max_text_tokens,
    )
    for reference in dict.fromkeys(path for prompt in every for path in prompt.references):
        for split in splits:
            family.check_reference_split(files, split, tokens, text, reference)


def require_references(config: RunConfig, references: Sequence[str], prompt: str = "") -> None:
    """Refuse reference pictures where the family takes none or fewer, and a prompt without any where it takes
    some.

    Args:
        prompt: whose they are, for the error; empty: they were given with the command.

    Raises:
        ModelError: see above.
    """
    most = family_of(config).references_max
    if bool(most) is bool(references) and len(references) <= most:
        return
    where = f"references of the prompt {prompt!r}" if prompt else "--reference"
    if references and most:
        raise ModelError(
            f"{where}: found {len(references)}; expected at most {most:g}, which is all that "
            f"model.family={config.model.family} reads. Leave out the others"
        )
    if most:
        raise ModelError(
            f"{where}: found none; model.family={config.model.family} draws from a picture: name one"
            + (', as in {"prompt": "...", "references": ["cat.png"]}' if prompt else "")
        )
    raise ModelError(
        f"{where}: found {references[0]}; expected none, since model.family={config.model.family} draws from "
        "text alone. Remove them, or train a family that edits pictures (qwen-image-edit)"
    )


def _require_step_cache(config: RunConfig, files: PipelineFiles | None) -> None:
    exploration, family, why = config.exploration, family_of(config), ""
    if exploration is None or exploration.step_cache is None:
        return
    if not family.reuses_blocks:
        why = f"diffusers has no step cache for model.family={config.model.family}"
    elif files is not None:
        layers = family.read_dimensions(files).layers
        if len(family.transformers(files)) > 1:
            why = "it has two transformers, and one's blocks cannot stand for the other's"
        elif layers < 2:
            why = f"it has {layers} transformer blocks, of which the first always runs"
    if why:
        raise ConfigError("the configuration", [exploration.step_cache_problem(config.model.path, why)])
