"""What holds for every model family, on a small random pipeline of its own, against its diffusers pipeline.

    @pytest.mark.parametrize("check", FAMILY_CHECKS)
    def test_my_family(check, tmp_path):
        size = MediaSize(32, 48)
        case = FamilyCase("my-family", size, [Setting(size), Setting(size, 12, scale=3.0)])
        check(load_family(MyFamily, case, tmp_path))

A check raises AssertionError with what differs. They run on a CPU, in seconds each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from spotlight.diffusion.samplers import ODE
from spotlight.models.condition import ModelInput
from spotlight.models.experts import denoisers
from spotlight.models.family import Guidance, MediaSize, ModelFamily
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId

TOLERANCE = 1e-5
"""Of pictures in [0, 1], in float32."""
PROMPTS = ("one red circle", "two blue squares left of a yellow triangle")  # of unequal length


@dataclass(frozen=True)
class Setting:
    """How one batch of pictures or videos is made by both sides.

    Attributes:
        scale: of true guidance, as ``rollout.true_cfg_scale``.
        embedded: as ``rollout.embedded_guidance``.
        prompts: one per row.
    """

    size: MediaSize
    steps: int = 3
    scale: float = 1.0
    negative: str = " "
    embedded: float | None = None
    prompts: Sequence[str] = PROMPTS


def call_pipeline(pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting) -> np.ndarray:
    """A picture pipeline's results for a setting's prompts: [batch, frames, height, width, 3] in [0, 1]."""
    guided = {"negative_prompt": [setting.negative] * len(setting.prompts)} if setting.scale > 1 else {}
    pictures = pipe(
        list(setting.prompts),
        height=setting.size.height,
        width=setting.size.width,
        num_inference_steps=setting.steps,
        latents=latents,
        max_sequence_length=family.max_text_tokens,
        output_type="np",
        **guided,
        **family.call_arguments(setting.scale, setting.embedded),
    ).images
    return np.asarray(pictures)[:, None]


def call_video_pipeline(
    pipe: Any, family: ModelFamily, latents: torch.Tensor, setting: Setting
) -> np.ndarray:
    """As :func:`call_pipeline`, of a video pipeline."""
    frames = pipe(
        list(setting.prompts),
        negative_prompt=[setting.negative] * len(setting.prompts),
        height=setting.size.height,
        width=setting.size.width,
        num_frames=setting.size.frames,
        num_inference_steps=setting.steps,
        latents=latents,
        max_sequence_length=family.max_text_tokens,
        output_type="np",
        **family.call_arguments(setting.scale, setting.embedded),
    ).frames
    return np.asarray(frames)


def texts_alone(
    prompts: Sequence[str], negative: str = " ", size: MediaSize | None = None
) -> Sequence[ModelInput]:
    """What most families embed."""
    return list(prompts)


@dataclass(frozen=True)
class FamilyCase:
    """A family under test.

    Attributes:
        name: in the registry.
        size: non-square, valid for every variant.
        settings: compared with the pipeline on every variant.
        first: the variants of the first tier; the others are slow.
        max_text_tokens: shorter than the real one where prompts are padded.
        call: runs the family's pipeline on initial latents of ours, [batch, *latent_shape].
        load: loads the family's pipeline.
        wide: changes to the transformer's configuration for a width of 256, 64 per head, and layers in the
            published proportions: its activations are compared with the plan's.
        unused: pattern of the parameters that no output of variant 0 depends on.
        inputs: what the family embeds of prompts, a negative prompt and a size, by default :attr:`size`.
        trained: variants that are trained, exported and split over ranks too; slow unless in ``first``.
    """

    name: str
    size: MediaSize
    settings: Sequence[Setting]
    max_text_tokens: int = 64
    call: Callable[[Any, ModelFamily, torch.Tensor, Setting], np.ndarray] = call_pipeline
    load: Callable[[Path], Any] = diffusers.DiffusionPipeline.from_pretrained
    unused: str = "^$"
    first: tuple[int, ...] = (0,)
    wide: Mapping[str, object] = field(default_factory=dict)
    inputs: Callable[..., Sequence[ModelInput]] = texts_alone
    trained: Sequence[int] = (0,)

    def guidance(self, family: ModelFamily, setting: Setting) -> Guidance:
        """A setting's guidance for ``family.velocity``."""
        conditions = family.encode(self.inputs(PROMPTS, setting.negative, setting.size))
        negative = family.negatives(conditions, family.encode([setting.negative])[0])
        return Guidance(setting.scale, negative, setting.embedded)


@dataclass(frozen=True)
class LoadedFamily:
    """One random pipeline, loaded by both sides."""

    case: FamilyCase
    directory: Path
    family: ModelFamily
    pipe: Any


def load_family(
    kind: type[ModelFamily], case: FamilyCase, directory: Path, *, variant: int = 0
) -> LoadedFamily:
    """Write a variant's small random pipeline, and load it as the family and as plain diffusers do."""
    pipeline = directory / "pipeline"
    kind.tiny(pipeline, seed=variant, variant=variant)
    family = kind.load(
        pipeline,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=directory / "embeddings",
        max_text_tokens=case.max_text_tokens,
    )
    return LoadedFamily(case, pipeline, family, plain_pipeline(kind, case, pipeline))


def plain_pipeline(kind: type[ModelFamily], case: FamilyCase, directory: Path) -> Any:
    """What diffusers loads from the directory."""
    pipe = case.load(directory)
    pipe.set_progress_bar_config(disable=True)
    exec("\n".join(kind.loading_lines(1.0, case.max_text_tokens)), {"pipe": pipe})
    return pipe


def draw(
    family: ModelFamily, case: FamilyCase, setting: Setting, model: torch.nn.Module | None = None
) -> tuple[torch.Tensor, np.ndarray]:
    """(initial latents, decoded frames) of a rollout of the engine's."""
    engine = Engine(family, max_batch=8, negative=family.encode([setting.negative])[0])
    recipe = Recipe(setting.size, ODE(), None, setting.scale, "final", setting.embedded)
    rollouts = [
        Rollout(RolloutId(f"r{i}"), Purpose.EVAL, 0, PromptId(f"p{i}"), 0, i, setting.steps, PolicyVersion(0))
        for i in range(len(PROMPTS))
    ]
    states = engine.start(
        rollouts, family.encode(case.inputs(PROMPTS, setting.negative, setting.size)), recipe
    )
    results = engine.run(family.transformer if model is None else model, states)
    finals = [result.tensors.final for result in results if isinstance(result, FinishedRollout)]
    latents = torch.stack([state.latents for state in states])
    return latents, family.decode_float(torch.stack(finals), setting.size)


def picture_difference(loaded: LoadedFamily, setting: Setting) -> float:
    """The largest difference from the pipeline's frames."""
    latents, ours = draw(loaded.family, loaded.case, setting)
    theirs = loaded.case.call(loaded.pipe, loaded.family, latents, setting)
    size = setting.size
    assert ours.shape == theirs.shape == (len(PROMPTS), size.frames, size.height, size.width, 3)
    return float(np.abs(ours - theirs).max())


def check_pictures(loaded: LoadedFamily) -> None:
    """Pictures are the pipeline's, in every setting."""
    for setting in loaded.case.settings:
        difference = picture_difference(loaded, setting)
        assert difference <= TOLERANCE, f"{difference:g} above {TOLERANCE:g} with {setting}"


def check_inputs(loaded: LoadedFamily) -> None:
    """Pictures depend on prompt, guidance, negative prompt and steps: or equality would prove little."""
    guided = loaded.family.guidance_argument is not None
    setting = replace(loaded.case.settings[-1], scale=3.0 if guided else 1.0)
    others = [replace(setting, steps=5)]
    if guided:
        others += [replace(setting, scale=1.0), replace(setting, negative="another")]
    if setting.embedded is not None:
        others.append(replace(setting, embedded=setting.embedded + 1))
    _, base = draw(loaded.family, loaded.case, setting)
    assert base.std() > 0.05, "the pictures are flat"
    assert np.abs(base[0] - base[1]).max() > 100 * TOLERANCE, "the pictures do not depend on the prompt"
    for other in others:
        changed = draw(loaded.family, loaded.case, other)[1]
        assert np.abs(changed - base).max() > 100 * TOLERANCE, f"nothing changes with {other}"


def check_weights(loaded: LoadedFamily) -> None:
    """Every weight of the transformer has a gradient, but those that the case says are unused."""
    family, setting = loaded.family, loaded.case.settings[-1]
    latents = torch.randn(
        len(PROMPTS), *family.latent_shape(setting.size), generator=torch.Generator().manual_seed(0)
    )
    family.transformer.requires_grad_(True)
    try:
        velocity = family.velocity(
            family.transformer,
            latents,
            torch.full([len(PROMPTS)], 0.6),
            family.collate(family.encode(loaded.case.inputs(PROMPTS, " ", setting.size))),
            loaded.case.guidance(family, setting),
            setting.size,
        )
        velocity.square().sum().backward()  # type: ignore[no-untyped-call]
        dead = [n for n, p in family.transformer.named_parameters() if p.grad is None or not p.grad.any()]
    finally:
        family.transformer.requires_grad_(False)
        family.transformer.zero_grad()
    unexpected = [name for name in dead if not re.search(loaded.case.unused, name)]
    assert not unexpected, f"no gradient: {', '.join(unexpected)}"


def layers_of(transformer: Any) -> list[torch.nn.Module]:
    """The blocks that planning counts: those that repeat, not those of text alone."""
    repeated = getattr(transformer, "_repeated_blocks", None) or transformer._no_split_modules or ()
    return [
        part
        for part in transformer.modules()
        if (kind := type(part).__name__) in repeated and "Block" in kind
    ]


def check_dimensions(loaded: LoadedFamily) -> None:
    """Layers, width, tokens and channels that planning reads are those of the running model."""
    family, size = loaded.family, loaded.case.size
    seen: list[torch.Size] = []

    def watch(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["hidden_states"].shape if "hidden_states" in kwargs else args[0].shape)

    transformer: Any = denoisers(family.transformer)["transformer"]
    blocks = layers_of(transformer)
    handle = blocks[0].register_forward_pre_hook(watch, with_kwargs=True)
    draw(family, loaded.case, Setting(size, steps=2, embedded=family.embedded_guidance))
    handle.remove()
    dimensions = family.dimensions
    assert len(blocks) == dimensions.layers
    _, tokens, width = seen[0]
    assert width == dimensions.width
    conditions = family.encode(loaded.case.inputs(PROMPTS))  # in one sequence in some models
    besides = {each.shape[0] for condition in conditions for each in condition.tensors.values()}
    assert tokens - dimensions.tokens(size) in {0, *besides, *(each.tokens for each in conditions)}
    assert np.prod(family.latent_shape(size)) == dimensions.tokens(size) * dimensions.channels


FAMILY_CHECKS: tuple[Callable[[LoadedFamily], None], ...] = (
    check_pictures, check_inputs, check_weights, check_dimensions,
)  # fmt: skip
