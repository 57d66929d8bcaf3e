"""Configuration of model and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from spotlight.config.section import Section
from spotlight.registry import FAMILIES
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

Attention = Literal["native", "math", "cudnn", "flash", "flash-varlen", "flash-3", "flash-3-varlen"]
"""Values of ``model.attention``; see :mod:`spotlight.models.kernels.attention`."""


class ModelConfig(Section):
    """Which Diffusion Transformer is trained."""

    family: Annotated[str, AfterValidator(FAMILIES.known())] = "qwen-image"
    """Model family: prompt template, guidance, schedule, decoding and LoRA targets of its pipeline."""
    path: str = "testbed"
    """Directory or hub id of a diffusers pipeline; ``testbed`` is the built-in tiny Qwen-Image,
    ``testbed-video`` the built-in tiny Wan. On a cluster, nodes that lack a hub id's files get them from
    nodes that have them.
    """
    revision: str | None = None
    """Branch, tag or commit if ``path`` is a hub id."""
    transformer: str | None = None
    """A fine-tuned transformer to start from, in place of the pipeline's: a directory or file of safetensors,
    with the names of diffusers' class.
    """
    lora: str | None = None
    """A LoRA to go on from, as policy and as reference: a file, a directory or a hub id. Only with
    ``learner.mode: lora``, of the same rank, alpha and targets.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the frozen weights. Adapters and optimizer state are always float32."""
    tf32: Literal["none", "convolutions", "all"] = "convolutions"
    """On NVIDIA GPUs, what of float32 is computed with TF32's 10-bit mantissas: convolutions (those of
    VAEs), or matrix products, too. ``none`` is exact and slower. bfloat16 is not concerned, nor are rewards.
    """
    attention: Attention | None = None
    """Attention kernels; ``spotlight doctor`` lists those of this machine. Default: torch chooses. The flash
    kernels take no mask, which prompts of unequal length in a batch need; those with ``varlen`` do where the
    model's padding comes last (not in Qwen-Image).
    """
    compile: Literal["none", "regional"] = "none"
    """``regional``: compile the transformer's repeated blocks (torch.compile); faster after the half minute
    or more that the first forwards take. Results change by rounding.
    """
    cuda_graphs: bool = False
    """Capture each kind of forward without gradient (slot, batch size, text length) as a CUDA graph, when it
    comes the second time: faster where small batches wait for the host. LoRA on bfloat16 weights; not for
    Qwen-Image-2.1.
    """
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512
    """Longer prompts are truncated as in the pipeline, or refused if it truncates none. Models that see the
    padding (FLUX.1, SD3.5) draw other pictures with another limit.
    """

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """A LoRA to start from where every weight is trained, and kernels that do not go together."""
        yield from self._kernel_problems(run)
        if self.cuda_graphs:
            yield from self._graph_problems(run)
        if self.lora is not None and run.learner.mode != "lora":
            yield Problem(
                "model.lora", repr(self.lora), f"nothing with learner.mode={run.learner.mode}",
                "Set learner.mode=lora, or merge the LoRA and give the result as model.transformer.",
            )  # fmt: skip

    def _kernel_problems(self, run: RunConfig) -> Iterator[Problem]:
        asked = {"attention": self.attention, "compile": None if self.compile == "none" else self.compile}
        family = self.family
        for key, value in asked.items():
            if value is not None and not FAMILIES.load(family).chooses_kernels:
                yield Problem(
                    f"model.{key}", repr(value), f"nothing with model.family={family}",
                    "diffusers offers neither for this model: leave it out.",
                )  # fmt: skip
        if self.attention is not None and (why := self._unfit(self.attention)) is not None:
            yield Problem(
                "model.attention", repr(self.attention), f"another kernel with model.family={family}",
                f"{why}: leave it out, or set one that takes every mask (native, cudnn).",
            )  # fmt: skip
        if self.compile == "none":
            return
        hooks = "Both change the blocks while they run, which compiled code would not notice"
        if run.fleet.sequence_parallel.degrees != (1,):
            yield Problem(
                "model.compile", repr(self.compile), "none with fleet.sequence_parallel.degrees above 1",
                f"{hooks}: leave one of them out.",
            )  # fmt: skip
        if run.exploration is not None and run.exploration.step_cache is not None:
            yield Problem(
                "model.compile", repr(self.compile), "none with exploration.step_cache",
                f"{hooks}: leave one of them out.",
            )  # fmt: skip

    def _unfit(self, attention: Attention) -> str | None:
        """Why a kernel would fail or draw other pictures with this family."""
        family = FAMILIES.load(self.family)
        if not family.chooses_kernels:
            return None
        if attention in ("flash", "flash-3") and family.always_masks:
            return "It takes no mask, and this model always has one"
        if attention in ("flash-varlen", "flash-3-varlen") and not family.pads_last:
            return "It takes each row's first keys, as if this model's padding came last"
        return None

    def _graph_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Whatever replaces weights, or does between kernels what a graph does not repeat."""
        degrees = run.fleet.sequence_parallel.degrees
        cached = None if run.exploration is None else run.exploration.step_cache
        captures = FAMILIES.load(self.family).captures_graphs
        for key, found, wanted, fits in (
            ("model.family", self.family, "one whose forward reads no values back", captures),
            ("device", run.device, "a CUDA device", run.device != "cpu"),
            ("model.dtype", self.dtype, "bfloat16", self.dtype == "bfloat16"),
            ("model.compile", self.compile, "none", self.compile == "none"),
            ("learner.mode", run.learner.mode, "lora", run.learner.mode == "lora"),
            ("fleet.sequence_parallel.degrees", list(degrees), "[1]", degrees == (1,)),
            ("exploration.step_cache", cached, "nothing", cached is None),
        ):
            if not fits:
                yield Problem(
                    key, str(found), f"{wanted} with model.cuda_graphs",
                    "Change it, or leave model.cuda_graphs out.",
                )  # fmt: skip


class DataConfig(Section):
    """Training prompts, and held-out prompts for evaluation."""

    train: str = "testbed"
    """File of training prompts (.txt: one per line; .jsonl: GenEval metadata); ``testbed`` and
    ``testbed-video``: built in. Must be set, like ``test``, for a model other than these.
    """
    test: str = "testbed"
    """File of held-out prompts for evaluation, in the same formats."""
    tags: tuple[str, ...] = ()
    """Keep only prompts with one of these metadata tags; empty: all."""
