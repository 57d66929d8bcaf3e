"""Use a trained run: generate, evaluate, export."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.config.load import load_dump
from spotlight.config.schema import RunConfig
from spotlight.config.sections.model import ModelConfig
from spotlight.data.datasets import columns_of
from spotlight.data.media_size import media_size
from spotlight.dry_run.model_checks import require_references, require_supported
from spotlight.models.condition import ModelInput, model_input
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.shared.quantised import Quantize
from spotlight.models.shared.transformer_files import weight_sources
from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.state import FailedRollout, FinishedRollout
from spotlight.runtime.assembly import components as build
from spotlight.runtime.observer import Observer
from spotlight.runtime.process import prepare_process
from spotlight.runtime.recorder import LEARNER_FOLDER
from spotlight.runtime.validation import Validation, summarise
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Phase, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.metrics import STDERR, VALIDATION, best_iterations, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.training.learner_state import load_weights
from spotlight.training.lora_export import export_lora, export_merged, export_renamed_lora, measured_rounding
from spotlight.training.sharding import Ranks
from spotlight_files.lora_names import Layout
from spotlight_files.model_errors import ModelError
from spotlight_files.update_rounding import LostUpdate
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import Prompt, PromptId
from spotlight_rewards.pool.waiting import SampleGroup
from spotlight_rewards.results import RewardBatch, RewardFailure
from spotlight_rewards.reward import RewardInputError

Picture = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run's newest checkpoint, loaded for inference.

    Attributes:
        iteration: iterations trained.
        weights: slot in use; ``reference`` is before training.
    """

    directory: Path
    config: RunConfig
    iteration: int
    weights: Slot
    _family: ModelFamily
    _slots: WeightSlots

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        weights: Slot | None = None,
        iteration: int | None = None,
        best: str | None = None,
        quantize: Quantize | None = None,
    ) -> Self:
        """Load a run's newest intact checkpoint; ``weights`` default to ``evaluation.weights``.

        ``model.attention``, ``kernels``, ``compile`` and ``cuda_graphs`` have their defaults.

        Args:
            iteration: load the checkpoint with so many iterations trained instead.
            best: or the kept one that this curve of validation is highest at; empty: the judged curve.
            quantize: in the place of ``model.quantize``.

        Raises:
            StoreError: not a run directory, or no checkpoint yet, or not that one, or asked for both ways.
            ModelError: the model is missing, the run has no such weights, or it trained what to quantise.
        """
        paths = RunPaths(directory)
        paths.require_run()
        config = _on_any_machine(load_dump(paths.config), device, quantize)
        checkpoints = CheckpointStore(paths.checkpoints, config.checkpoint.keep)
        iteration = _asked_iteration(directory, checkpoints, iteration, best)  # before the model is loaded
        device_here = build.pick_device(config)
        prepare_process(device_here, config.deterministic, config.model.tf32)
        family = build.load_family(config, device_here)
        slots = build.make_slots(config, family, build.make_algorithm(config))
        chosen = config.evaluation.weights if weights is None else weights
        _require_slot(slots, chosen)

        def load(newest: Checkpoint) -> int:
            load_weights(newest.directory / LEARNER_FOLDER, slots)
            return newest.header.iteration

        asked = None if iteration is None else checkpoints.made_after(iteration)
        loaded = checkpoints.read_newest(load) if asked is None else load(asked)
        if loaded is None or iteration not in (None, loaded):
            raise StoreError(
                f"{directory}: its checkpoints were removed; let `spotlight train` write another."
            )
        return cls(directory, config, loaded, chosen, family, slots)

    def with_weights(self, weights: Slot) -> TrainedRun:
        """The same run with other weights. Raises ModelError if it has none such.

        A full fine-tune keeps ``reference`` only if its algorithm needs one.
        """
        _require_slot(self._slots, weights)
        return dataclasses.replace(self, weights=weights)

    def with_size(self, height: int | None, width: int | None) -> TrainedRun:
        """The same run with pictures of another size; None: as it is.

        Raises:
            ModelError: the model makes none of that size.
        """
        sides = {"height": height, "width": width}
        changed = {name: side for name, side in sides.items() if side is not None}
        config = self.config.model_copy(update={"rollout": self.config.rollout.model_copy(update=changed)})
        require_supported(config, self._family.files)
        return dataclasses.replace(self, config=config)

    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        steps: int | None = None,
        guidance: float | None = None,
        references: Sequence[Path] = (),
    ) -> Picture:
        """One image per (prompt, seed) pair: [pairs, height, width, 3] uint8, ODE sampler.

        Args:
            references: pictures that all prompts are about.

        Raises:
            ValueError: ``prompts`` and ``seeds`` differ in length.
            ModelError: ``guidance`` is no scale, or the model ignores it, or has another number of steps;
                pictures not finite.
        """
        rollouts = [
            self._rollout(f"g{index:06d}", Prompt(PromptId(text), text, {}), seed, steps)
            for index, (text, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        shown = [str(path.resolve()) for path in references]
        require_references(self.config, shown)
        inputs = {PromptId(text): self._input(text, shown) for text in prompts}
        results = [one for part in self._denoise(rollouts, inputs, guidance, Observer()) for one in part]
        pictures = [result.image for result in results if isinstance(result, FinishedRollout)]
        if len(pictures) != len(results):
            raise ModelError(
                f"{len(results) - len(pictures)} pictures are not finite: the weights have diverged"
            )
        return np.stack(pictures)

    def evaluate(
        self,
        observer: Observer,
        images_per_prompt: int | None = None,
        steps: int | None = None,
        prompts_file: Path | None = None,
    ) -> Validation:
        """Evaluate on held-out prompts, with the same seeds as the run's own evaluations.

        Raises:
            ConfigError, PromptFileError: ``prompts_file`` is unusable.
            RewardSetupError, RewardInputError: before generating, or if no image could be scored.
            ModelError: no image is finite.
        """
        config = self.config
        if prompts_file is None:
            prompts: Sequence[Prompt] = build.load_held_out(config)
        else:
            prompts = build.read_prompts("--prompts", prompts_file, columns=columns_of(config))
        count = images_per_prompt or config.evaluation.images_per_prompt
        rollouts = [
            self._rollout(
                f"e{slot:04d}-{member:03d}", prompt, derive_seed(0, "eval", prompt.id, member), steps
            )
            for slot, prompt in enumerate(prompts)
            for member in range(count)
        ]
        for prompt in prompts:
            require_references(config, prompt.references, prompt.text)
        by_id = {prompt.id: prompt for prompt in prompts}
        scores = self._score(rollouts, by_id, observer, count)
        scored = [rollout for rollout in rollouts if rollout.id in scores]
        return summarise(scored, scores, by_id, config.evaluation.strict)

    def _score(
        self, rollouts: Sequence[Rollout], prompts: Mapping[PromptId, Prompt], observer: Observer, count: int
    ) -> dict[RolloutId, dict[str, float]]:
        used = prompts.values()
        inputs = {prompt.id: self._input(prompt.text, prompt.references) for prompt in used}
        issued = Counter(rollout.prompt_id for rollout in rollouts)
        waiting: list[tuple[list[RolloutId], Future[RewardBatch]]] = []  # no pictures: they are freed
        finished, made = list[FinishedRollout](), 0
        config = _rewards_here(self.config, count)
        with build.make_reward_pool(config, run_directory=self.directory) as rewards:
            rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
            for results in self._denoise(rollouts, inputs, None, observer):
                for result in results:
                    if isinstance(result, FailedRollout):
                        observer.note(f"{result.rollout.id}: no picture: {result.reason}")
                finished += [result for result in results if isinstance(result, FinishedRollout)]
                made += len(results)
                # A submission holds whole groups, which a batch of rollouts may cut in two.
                if rewards.compares_groups and made < len(rollouts):
                    continue
                asked = [prompts[result.rollout.prompt_id] for result in finished]
                pending = rewards.submit(
                    [result.image for result in finished],
                    [prompt.text for prompt in asked],
                    [prompt.metadata for prompt in asked],
                    [SampleGroup(str(prompt.id), issued[prompt.id]) for prompt in asked],
                )
                waiting.append(([result.rollout.id for result in finished], pending))
                finished = []
            batches = [(submitted, pending.result()) for submitted, pending in waiting]
        scores: dict[RolloutId, dict[str, float]] = {}
        failures: list[str] = []
        for submitted, batch in batches:
            for rollout, sample in zip(submitted, batch.samples, strict=True):
                if isinstance(sample, RewardFailure):
                    failures.append(f"{sample.reward}: {sample.message}")
                    observer.note(f"{rollout} is not scored: {failures[-1]}")
                else:
                    scores[rollout] = sample.curves()
        if not scores and failures:
            raise RewardInputError(
                f"none of {len(failures)} pictures could be scored; the first: {failures[0]}"
            )
        if not scores:
            raise ModelError(f"none of {len(rollouts)} pictures is finite: the weights have diverged")
        return scores

    def export_lora(self, directory: Path) -> Path:
        """Write the adapter for diffusers' ``load_lora_weights``. Raises ModelError for a full fine-tune."""
        return _written(export_lora(self._family, self._slots, self.weights, directory, Ranks()))

    def export_renamed_lora(self, directory: Path, layout: Layout) -> list[Path]:
        """Write the adapter for ComfyUI or kohya's scripts. Raises ModelError as ``export_renamed_lora``."""
        return export_renamed_lora(
            self._family, self._slots, self.weights, directory, self.config.name, layout
        )

    def export_merged(
        self, directory: Path, dtype: Literal["float32", "bfloat16"] | None = None
    ) -> LostUpdate | None:
        """Write a complete pipeline directory with merged weights.

        Args:
            dtype: of the transformer's files; default: ``model.dtype``.

        Returns:
            What rounding lost of the trained update; None: nothing, or there is no update.
        """
        family, model = self._family, self.config.model
        names = list(denoisers(family.transformer))
        rounding = measured_rounding(
            family,
            build.torch_dtype(dtype or model.dtype),
            weight_sources(family.files, names, model.transformer),
        )
        _written(export_merged(family, self._slots, self.weights, directory, Ranks(), rounding=rounding))
        return rounding.lost()

    def _rollout(self, name: str, prompt: Prompt, seed: int, steps: int | None) -> Rollout:
        return Rollout(
            RolloutId(name),
            Purpose.EVAL,
            self.iteration,
            prompt.id,
            0,
            seed,
            steps or self.config.evaluation.steps,
            PolicyVersion(0),
        )

    def _input(self, text: str, references: Sequence[str]) -> ModelInput:
        rollout = self.config.rollout
        return model_input(text, references, rollout.negative_prompt, media_size(rollout))

    def _denoise(
        self,
        rollouts: Sequence[Rollout],
        inputs: Mapping[PromptId, ModelInput],
        guidance: float | None,
        observer: Observer,
    ) -> Iterator[list[FinishedRollout | FailedRollout]]:
        recipe = build.make_recipes(self.config, build.make_algorithm(self.config))[Purpose.EVAL]
        if guidance is not None:
            self._family.check_guidance(self._family.files, guidance, "guidance")
            recipe = dataclasses.replace(recipe, guidance_scale=guidance)
        unique = list(dict.fromkeys(inputs[rollout.prompt_id] for rollout in rollouts))
        with _transformer_aside(self._family, wanted := [self.config.rollout.negative_prompt, *unique]):
            negative, *conditions = self._family.encode(wanted)
            self._family.free_text_encoder()
        encoded = dict(zip(unique, conditions, strict=True))
        batch = self.config.rollout.batch_size
        engine = build.make_engine(self.config, self._family, negative)
        with self._slots.use(self.weights, merged=engine.autocast is None) as model:
            for start in range(0, len(rollouts), batch):
                part = rollouts[start : start + batch]
                states = engine.start(part, [encoded[inputs[rollout.prompt_id]] for rollout in part], recipe)
                results = engine.run(model, states)
                observer.work(Phase.EVALUATION, start + len(part), len(rollouts))
                yield results


@contextmanager
def _transformer_aside(family: ModelFamily, wanted: Sequence[ModelInput]) -> Iterator[None]:
    """While prompts are embedded, the transformer waits in the host's memory: a GPU may not hold both."""
    device = family.device
    if device.type == "cpu" or family.text_device != device or not family.not_embedded(wanted):
        yield
        return
    family.transformer.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        family.transformer.to(device)


def _asked_iteration(
    directory: Path, checkpoints: CheckpointStore, iteration: int | None, best: str | None
) -> int | None:
    """Of the checkpoint that is asked for; None: the newest. Raises StoreError."""
    if best is not None and iteration is not None:
        raise StoreError(
            f"{directory}: iteration {iteration} and the best; expected one of the two. Leave one out."
        )
    if not checkpoints.any_committed:
        raise StoreError(f"{directory}: no checkpoint yet; let `spotlight train` finish an iteration.")
    if best is not None:
        iteration = _best_kept(directory, checkpoints.iterations, best)
    if iteration is not None and iteration not in checkpoints.iterations:
        kept = ", ".join(map(str, checkpoints.iterations))
        raise StoreError(
            f"{directory}: no checkpoint after iteration {iteration}; expected one of those kept: "
            f"{kept}. checkpoint.keep and checkpoint.best say which are."
        )
    return iteration


def _best_kept(directory: Path, kept: Sequence[int], curve: str) -> int:
    rows = read_metrics(directory)
    found = next((each for each in best_iterations(rows, curve or None) if each in kept), None)
    if found is None:
        curves = dict.fromkeys(
            name.removeprefix(VALIDATION)
            for row in rows
            for name in row.values
            if name.startswith(VALIDATION) and not name.endswith(STDERR)
        )
        raise StoreError(
            f"{directory}: no kept checkpoint (after iterations {', '.join(map(str, kept))}) has a validation"
            f"{' of ' + repr(curve) if curve else ''}; expected one. Curves: {', '.join(curves) or 'none'}."
        )
    return found


def _on_any_machine(
    config: RunConfig, device: Literal["auto", "cpu", "cuda"], quantize: Quantize | None
) -> RunConfig:
    """With the kernels that every machine has: this one may lack those that the run was trained with."""
    names = ("attention", "kernels", "compile", "cuda_graphs")
    plain = {name: ModelConfig.model_fields[name].default for name in names}
    if quantize not in (None, "none") and config.learner.mode == "full":
        raise ModelError(f"quantize is {quantize!r}; expected none: all weights of this run were trained")
    plain["quantize"] = quantize or config.model.quantize
    return config.model_copy(update={"device": device, "model": config.model.model_copy(update=plain)})


def _rewards_here(config: RunConfig, images_per_prompt: int) -> RunConfig:
    """With rewards beside this command: the run's places may be those of a cluster."""
    rewards = tuple(
        reward.model_copy(update={"replicas": None, "device": "cpu" if reward.device == "cpu" else "auto"})
        for reward in config.rewards
    )
    evaluation = config.evaluation.model_copy(update={"images_per_prompt": images_per_prompt, "at_end": True})
    return config.model_copy(update={"rewards": rewards, "evaluation": evaluation})


def _require_slot(slots: WeightSlots, slot: Slot) -> None:
    if slot not in slots.slots:
        raise ModelError(f"weights {slot!r}: this run has {', '.join(slots.slots)}")


def _written(path: Path | None) -> Path:
    assert path is not None, "a single rank is the main rank"
    return path
