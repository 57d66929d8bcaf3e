"""Configuration of model and prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from spotlight.config.requires import SET, UNSET, Requires, That, more_than, other_than
from spotlight.config.section import Section
from spotlight.registry import FAMILIES
from spotlight_rewards.base.strict_section import STATE, WORK

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

Attention = Literal["native", "math", "cudnn", "flash", "flash-varlen", "flash-3", "flash-3-varlen"]
"""Values of ``model.attention``; see :mod:`spotlight.models.kernels.attention`."""


def _chooses(run: RunConfig) -> bool:
    return FAMILIES.load(run.model.family).chooses_kernels


def _compares_passes(run: RunConfig) -> bool:
    return run.algorithm.recomputes_log_probs or not run.algorithm.learns_from_clean_samples


_KERNELS = "leave it out, or set one that takes every mask (native, cudnn)."
WHOLE = "Ranks cannot share a quantised model: set learner.shard=none, or leave model.quantize out."
_GRAPHS, _QUANTISED = {"model.cuda_graphs": True}, {"model.quantize": other_than("none")}
_NO_GRAPHS = "Change it, or leave model.cuda_graphs out."


class ModelConfig(Section):
    """Which Diffusion Transformer is trained."""

    family: Annotated[str, AfterValidator(FAMILIES.known()), STATE] = "qwen-image"
    """Model family: prompt template, guidance, schedule, decoding and LoRA targets of its pipeline."""
    path: Annotated[str, STATE] = "testbed"
    """Directory or hub id of a diffusers pipeline. Built in: ``testbed``, a tiny Qwen-Image that draws
    shapes, ``testbed-text``, one that writes, and ``testbed-video``, a tiny Wan. On a cluster, nodes without
    the files of a hub id get them from nodes that have them.
    """
    revision: Annotated[str | None, STATE] = None
    """Branch, tag or commit if ``path`` is a hub id."""
    transformer: Annotated[str | None, STATE] = None
    """A fine-tuned transformer to start from, in place of the pipeline's: a directory or file of safetensors,
    whose tensors have the names of diffusers' class.
    """
    lora: Annotated[str | None, STATE] = None
    """A LoRA to start from, as policy and as reference: a file, a directory (peft's, too) or a hub id. Only
    with ``learner.mode: lora``, of the same rank and targets; its update is the same under any alpha. Built
    in: ``testbed-four-steps`` (rank 8), with which ``testbed`` draws in four steps.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the frozen weights. Adapters and optimizer state are always float32."""
    tf32: Literal["none", "convolutions", "all"] = "convolutions"
    """Which float32 operations NVIDIA GPUs compute with TF32's 10-bit mantissas: ``convolutions`` (those of
    VAEs), or ``all``: matrix products, too. ``none`` is exact and slower. Does not affect rewards.
    """
    attention: Attention | None = None
    """Attention kernels; ``spotlight doctor`` lists those of this machine. Default: torch chooses. The flash
    kernels take no mask, which prompts of unequal length in a batch need; the ``varlen`` ones do if the
    model's padding comes last (not in Qwen-Image).
    """
    kernels: Literal["fused", "reference"] | None = None
    """What runs between matrix products: ``fused`` operators, or diffusers' slower ones (``reference``).
    Results differ by rounding. Default: fused on NVIDIA GPUs, except with ``learner.mode: full`` and with
    ``model.compile``. Blocks without fused operators, or whose outputs differ from diffusers' on this GPU,
    keep diffusers' own; the log names them.
    """
    quantize: Annotated[Literal["none", "int8", "nf4"], STATE] = "none"
    """How the linear layers of the frozen base's blocks are held while adapters are trained. ``none``: as
    ``model.dtype`` says; ``int8``: 8 bits (a scale for each output; errors below 1 % of the weights);
    ``nf4``: 4 bits (9 %). Rollouts and updates use the same weights; a merged export adds the adapter to
    those of the files.
    """
    compile: Literal["none", "regional"] = "none"
    """``regional``: compile the transformer's repeated blocks (torch.compile); faster after the half minute
    or more that the first forwards take. Results change by rounding, differently with and without gradient:
    not for algorithms that compare log-probs of both.
    """
    cuda_graphs: Annotated[bool, WORK] = False
    """Capture each kind of forward without gradient (slot, batch size, text length) as a CUDA graph, the
    second time it occurs: faster where small batches wait for the host. LoRA on bfloat16 weights; not for
    Qwen-Image-2.1 and HunyuanVideo 1.5.
    """
    text_encoder: Literal["device", "cpu"] = "device"
    """Where prompts are embedded before the model is read: on the run's device, or on the CPU, which may take
    a minute per prompt. Embeddings stay in the disk cache, which may be copied from another machine.
    """
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512
    """Longer prompts are truncated as in the pipeline, or refused if it truncates none. Models that see the
    padding (FLUX.1, SD3.5) draw different pictures with a different limit.
    """

    requires = (
        *(Requires(key, That("with model.family={model.family}, for which diffusers offers no other",
                             lambda run: not _chooses(run)),
                   default, "There is nothing to choose: leave it out.")
          for key, default in (("model.attention", None), ("model.compile", "none"))),
        Requires("model.attention",
                 That("with model.family={model.family}, which always has a mask",
                      lambda run: _chooses(run) and FAMILIES.load(run.model.family).always_masks),
                 That("another kernel", lambda run: run.model.attention not in ("flash", "flash-3")),
                 f"flash and flash-3 take no mask, and this model always has one: {_KERNELS}"),
        Requires("model.attention",
                 That("with model.family={model.family}, whose padding does not come last",
                      lambda run: _chooses(run) and not FAMILIES.load(run.model.family).pads_last),
                 That("another kernel",
                      lambda run: run.model.attention not in ("flash-varlen", "flash-3-varlen")),
                 "The varlen kernels take each row's first keys, as if this model's padding came last: "
                 f"{_KERNELS}"),
        *(Requires("model.compile", where, "none",
                   "Both change the blocks while they run, which compiled code would not notice: leave one "
                   "of them out.")
          for where in (
              {"fleet.sequence_parallel.degrees": other_than((1,))}, {"exploration.step_cache": SET})),
        Requires("model.compile",
                 That("with algorithm.name={algorithm.name}, whose ratios compare forwards with and without "
                      "gradient", _compares_passes), "none",
                 "Compiled, these are two graphs, which differ by more than clip ranges: leave it out. Fused "
                 "operators (model.kernels) give the same results in both."),
        *(Requires("model.kernels", where, (None, "reference"), f"{why}: leave it out.")
          for where, why in (
              ({"model.compile": "regional"}, "Compiled blocks are fused by the compiler"),
              ({"learner.mode": "full"}, "Fused operators are for adapters"),
              ({"model.dtype": "float32", "learner.autocast": "bfloat16"},
               "Under autocast types change between operators"))),
        # Whatever replaces weights, or does between kernels what a graph does not repeat.
        Requires("model.family", _GRAPHS, That("one whose forward reads no values back",
                 lambda run: FAMILIES.load(run.model.family).captures_graphs), _NO_GRAPHS),
        *(Requires(key, _GRAPHS, wanted, _NO_GRAPHS) for key, wanted in (
            ("device", other_than("cpu")), ("model.dtype", "bfloat16"), ("model.compile", "none"),
            ("learner.mode", "lora"), ("fleet.sequence_parallel.degrees", ((1,),)),
            ("exploration.step_cache", UNSET))),
        *(Requires(key, _QUANTISED, wanted, f"{why}, or leave model.quantize out.")
          for key, wanted, why in (
              ("learner.mode", "lora", "All weights can only be trained unquantised: set learner.mode=lora"),
              ("model.compile", "none", "Compiled code would keep whole weights: leave it out"),
              ("model.cuda_graphs", False, "A graph would keep memory for whole weights: leave it out"))),
        Requires("learner.shard", {"fleet.learner_ranks": more_than(1), **_QUANTISED}, "none", WHOLE),
        Requires("model.lora", {"learner.mode": other_than("lora")}, None,
                 "Set learner.mode=lora, or merge the LoRA and give the result as model.transformer."),
    )  # fmt: skip


class DataConfig(Section):
    """Training prompts, and held-out prompts for evaluation."""

    train: str = "testbed"
    """File of training prompts (.txt: one per line; .jsonl, .csv, .tsv, .parquet: also metadata), a folder of
    pictures with captions, or a Hugging Face dataset, by its folder or as ``hf:OWNER/NAME``, with ``:SPLIT``
    if not ``train``; ``testbed``, ``testbed-text`` and ``testbed-video``: built in. Must be set, like
    ``test``, for a model other than these.
    """
    test: str = "testbed"
    """File of held-out prompts for evaluation, in the same formats."""
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    """Column or key that holds the prompts, in ``train`` and ``test``; the others are metadata, except for
    ``prompt`` if another is named. Not for .txt files, folders of pictures and the built-in prompts.
    """
    reference_column: Annotated[str, Field(min_length=1)] | None = None
    """Column or key of the pictures that prompts refer to, in ``train`` and ``test``: paths (Flow-Factory's
    ``image`` and ``images``), UniRL's ``media``, or pictures in a data set, which are kept in ``cache_dir``
    by their digest. Default: only ``references``, a list of paths.
    """
    tags: tuple[str, ...] = ()
    """Keep only prompts with one of these metadata tags; empty: all."""
