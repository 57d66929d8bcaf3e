"""Part A: rows that say whether results are right."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import lab as model
from benchmarks.gpu.lab import CLIP_RANGE, Lab, reference
from benchmarks.gpu.suite import Outcome
from benchmarks.gpu.timing import copy_tb_s, kernels, matmul_tflops
from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.memory_plan import Estimate, memory_parts
from spotlight.dry_run.model_plan import ModelSizes, bind_targets, lora_parameters
from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.kernels.attention import BACKENDS as OFFERED
from spotlight.models.kernels.regional import compile_blocks
from spotlight.models.shared.quantised import Quantize, as_stored
from spotlight.models.skeleton import base_state, filling
from spotlight.models.slots import LoraSlots
from spotlight.training.device_memory import measure_peak
from spotlight.training.learner import Learner

BACKENDS = tuple(dict.fromkeys(["_native_math", *OFFERED.values(), "_native_flash", "_native_efficient"]))
"""diffusers' names, the reference first: all of ``model.attention``, and what torch itself chooses from."""
STEPS = 4
GPU_TESTS = ("tests/contract/test_cuda_ipc.py", "tests/e2e/test_gpu.py")
"""Files; tests/gpu/test_rows.py is this suite again, on a tiny model."""


def matmul_ceiling(lab: Lab) -> Outcome:
    """What the other rows' TFLOP/s are to be compared with."""
    return Outcome(matmul_tflops(lab))


def copy_ceiling(lab: Lab) -> Outcome:
    """What the other rows' bytes a second are to be compared with."""
    return Outcome(copy_tb_s(lab))


def worst(values: Iterable[float]) -> float:
    """The largest; NaN if anything is (``max`` passes over NaN)."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in float64 on the CPU; NaN if anything is."""
    a, b = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def velocity_against_cpu(lab: Lab) -> Outcome:
    """bfloat16 on the device against float32 on the CPU, the same weights."""
    shape, layers = lab.scale.exact, lab.scale.few_layers
    family = lab.fresh(layers)
    found = lab.velocity(family, family.transformer, shape)
    there = Lab(lab.home, torch.device("cpu"), tiny=lab.tiny)
    reference = there.empty(layers, torch.float32)
    theirs = family.transformer.state_dict()
    with filling(reference.transformer) as targets:
        for name, tensor in targets.items():
            tensor.copy_(theirs[name])
    latents, sigma = lab.latents(family, shape)
    text = reference.collate(lab.conditions(family, shape))
    expected = model.forward(reference, reference.transformer, latents.cpu(), sigma.cpu(), text, shape)
    return Outcome(distance(found, expected), {"layers": layers, "norm": float(expected.norm())})


def velocity_padded(lab: Lab) -> Outcome:
    """A prompt padded to a longer one's length against the same prompt alone, in float32.

    In bfloat16 a batch of two differs from one as much whether a prompt is padded or not; details have both.
    """
    values = _padded(lab, torch.float32)
    details = {"layers": lab.scale.few_layers, "bfloat16": _padded(lab, torch.bfloat16), "float32": values}
    return Outcome(worst(values.values()), details)


def _padded(lab: Lab, dtype: torch.dtype) -> dict[str, float]:
    """Velocities of a batch of a padded and of the longest prompt, against each alone."""
    family, shape = lab.fresh(lab.scale.few_layers, dtype), lab.scale.exact
    short, long = lab.condition(family, shape.text - 3), lab.condition(family, 2 * shape.text, 1)
    latents, sigma = lab.latents(family, shape)
    module = family.transformer
    both = model.forward(family, module, latents, sigma, family.collate([short, long]), shape)
    alone = [
        model.forward(family, module, latents[i : i + 1], sigma[i : i + 1], family.collate([text]), shape)
        for i, text in enumerate((short, long))
    ]
    values = [distance(both[i : i + 1], found) for i, found in enumerate(alone)]
    return {"padded": values[0], "longest": values[1]}


@contextmanager
def attention(module: nn.Module, backend: str) -> Iterator[None]:
    """The transformer with one of diffusers' attention backends."""
    module.set_attention_backend(backend)  # type: ignore[operator]
    try:
        yield
    finally:
        # diffusers keeps a global one, too, which resetting leaves.
        module.set_attention_backend("native")  # type: ignore[operator]
        module.reset_attention_backend()  # type: ignore[operator]


def attention_backends(lab: Lab) -> Outcome:
    """Every backend that runs here against the plainest, with and without a mask; and which kernels ran."""
    layers, shape = lab.scale.few_layers, lab.scale.exact
    family = lab.fresh(layers)
    found: dict[str, Tensor] = {}
    details: dict[str, object] = {}
    for backend, masked in itertools.product(BACKENDS, (False, True)):
        texts = [lab.condition(family, shape.text - 3 * (i if masked else 0), i) for i in range(shape.batch)]
        name = f"{backend}{' masked' if masked else ''}"
        if masked and "varlen" in backend and not family.pads_last:
            details[name] = "refused with the configuration: it would compute something else"
            continue

        def run(texts: list[Condition] = texts) -> Tensor:
            return lab.velocity(family, family.transformer, shape, texts)

        try:
            with attention(family.transformer, backend):
                found[name] = run()
                ran = kernels(run, lab.device)
        except (RuntimeError, ValueError, ImportError, NotImplementedError, KeyError, TypeError) as error:
            if isinstance(error, torch.AcceleratorError):
                raise  # the context is broken
            details[name] = f"does not run: {str(error).strip().splitlines()[0][:200]}"
            continue
        plain = found["_native_math masked" if masked else "_native_math"]
        kernel = [k for k in ran if re.search(r"flash|fmha|attention|sdpa|softmax|cudnn", k, re.IGNORECASE)]
        details[name] = {"difference": distance(found[name], plain), "kernels": [k[:120] for k in kernel[:4]]}
    differences = [row["difference"] for row in details.values() if isinstance(row, dict)]
    if len(differences) <= 2:
        raise RuntimeError(f"no backend but the plainest runs here: {details}")
    return Outcome(worst(differences), {"layers": layers, **details})


def rollout_against_replay(lab: Lab) -> Outcome:
    """Log-probs of the learner's first forward against those of the rollout, in units of the clip range."""
    shape, slots, family = lab.scale.train_small, lab.slots(), lab.family()
    samples = lab.samples(family, slots, shape, STEPS)
    with learning(lab, family, slots, shape) as learner:
        report = model.train(learner, samples)
    steps = {name: value for name, value in report.items() if name.startswith("replay/")}
    if not steps:
        raise RuntimeError(f"the learner reports no replay difference, only {', '.join(report)}")
    return Outcome(worst(steps.values()) / CLIP_RANGE, {**steps, "clip_range": CLIP_RANGE})


def compiled_replay(lab: Lab) -> Outcome:
    """The same with compiled blocks, which is why they are refused where log-probs are compared."""
    with compiled(lab, lab.family().transformer):
        return rollout_against_replay(lab)


@contextmanager
def learning(
    lab: Lab, family: QwenImage, slots: LoraSlots, shape: model.Shape, **settings: Any
) -> Iterator[Learner]:
    """A learner on the shared slots; their weights and the module's settings are as before afterwards."""
    before = {name: tensor.clone() for name, tensor in slots.state("policy").items()}
    try:
        yield lab.learner(family, slots, shape, **{"recompute": "blocks", **settings})
    finally:
        family.transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        slots.load_state("policy", before)
        for parameter in slots.trainable_parameters().values():
            parameter.grad = None


@contextmanager
def compiled(lab: Lab, module: nn.Module) -> Iterator[None]:
    """The transformer with its blocks compiled, all by the same code; on a CPU without generating any."""
    torch._dynamo.reset()
    with reference(module):
        compile_blocks(module, lab.device, "inductor" if lab.device.type == "cuda" else "aot_eager")
        try:
            yield
        finally:
            for part in module.modules():
                part._compiled_call_impl = None
            torch._dynamo.reset()


def fused_against_reference(lab: Lab) -> Outcome:
    """Fused operators against diffusers' and peft's, few layers: velocity, or all gradients of an update."""
    layers = lab.scale.few_layers
    family, slots, shape = lab.family(layers), lab.slots(layers), lab.scale.small
    samples = lab.samples(family, slots, lab.scale.train_small, 2)

    def outcome() -> tuple[Tensor, Tensor]:
        with slots.use("policy", merged=True) as module:
            velocity = lab.velocity(family, module, shape)
        with learning(lab, family, slots, lab.scale.train_small) as learner:
            model.train(learner, samples, step=False)
            slopes = [p.grad.flatten() for p in slots.parameters("policy").values() if p.grad is not None]
            return velocity, torch.cat(slopes)

    found = outcome()
    with reference(family.transformer):
        wanted = outcome()
    values = {
        name: float((a - b).norm() / b.norm())
        for name, a, b in zip(("velocity", "gradient"), found, wanted, strict=True)
    }
    return Outcome(worst(values.values()), values)


def compiled_against_eager(lab: Lab) -> Outcome:
    """Blocks compiled by region against eager, for two shapes; and how many graphs that took."""
    from torch._dynamo.utils import counters

    layers = lab.scale.few_layers
    family = lab.fresh(layers)
    shapes = (lab.scale.exact, lab.scale.train_small)
    eager = [lab.velocity(family, family.transformer, shape) for shape in shapes]
    counters.clear()
    with compiled(lab, family.transformer):
        found = [lab.velocity(family, family.transformer, shape) for shape in shapes]
        graphs = int(counters["stats"]["unique_graphs"])
    values = [distance(a, b) for a, b in zip(found, eager, strict=True)]
    return Outcome(worst(values), {"layers": layers, "graphs": graphs, "by shape": values})


def memory_against_plan(lab: Lab) -> Outcome:
    """Measured peaks of denoising and training against ``--dry-run``: the largest relative error."""
    family, slots = lab.family(), lab.slots()
    shape, train = lab.scale.small, lab.scale.train_small
    plan = _planned(lab, shape, train)
    engine = lab.engine(family, shape)
    states = lab.start(family, engine, shape, STEPS)
    with slots.use("policy", merged=True) as module:
        engine.step(module, states)
        _, denoising = measure_peak(lab.device, lambda: engine.step(module, states))
    samples = lab.samples(family, slots, train, STEPS)
    with learning(lab, family, slots, train) as learner:
        model.accumulate(learner, samples)  # allocates the gradients
        learner.step()
        learner.finish_batch()
        model.accumulate(learner, samples)
        learner.step()
        learner.finish_batch()
        _, training = measure_peak(lab.device, lambda: model.accumulate(learner, samples))
    measured = {"denoising forward": denoising, "training": training}
    errors = {name: plan[name] / found - 1 for name, found in measured.items()}
    details = {
        name: {"plan_gb": plan[name] / 1e9, "measured_gb": found / 1e9, "error": errors[name]}
        for name, found in measured.items()
    }
    return Outcome(worst(map(abs, errors.values())), details)


def _planned(lab: Lab, shape: model.Shape, train: model.Shape) -> dict[str, float]:
    """Bytes by part. Learner and rollouts have sizes of their own, so there are two plans."""
    found: dict[str, float] = {}
    for one, names in ((shape, {"denoising forward"}), (train, {"activations", "gradients"})):
        config = planned_run(lab, lab.scale.layers, one, micro_batch=one.batch)
        found |= {
            part.part: part.bytes
            for part in planned_parts(lab, lab.family(), config, one)
            if part.part in names
        }
    return found | {"training": found["activations"] + found["gradients"]}


def planned_run(
    lab: Lab, layers: int, shape: model.Shape, *, micro_batch: int, quantize: Quantize = "none"
) -> RunConfig:
    """A run that does what the lab's rollouts and learner do."""
    return build_config(
        {
            "model": {"path": str(lab.pipeline(layers)), "dtype": "bfloat16", "quantize": quantize},
            "algorithm": {"name": "flow-grpo"},
            "rollout": {
                "sampler": "flow-sde",
                "height": shape.side_px,
                "width": shape.side_px,
                "batch_size": shape.batch,
                "group_size": shape.batch,
                "prompts_per_iteration": 1,
                "true_cfg_scale": 1.0,
            },
            "learner": {
                "micro_batch_size": micro_batch,
                "recompute": "blocks",
                "autocast": "bfloat16",
                "lora": {"rank": lab.scale.rank, "alpha": 2.0 * lab.scale.rank},
            },
        },
        "the GPU suite",
    )


def planned_parts(lab: Lab, family: QwenImage, config: RunConfig, shape: model.Shape) -> tuple[Estimate, ...]:
    """The dry run's parts of memory."""
    sizes = _sizes(family)
    trained = lora_parameters(bind_targets(sizes, family.lora_targets), lab.scale.rank)
    return memory_parts(config, sizes, trained, shape.text)


def _sizes(family: QwenImage) -> ModelSizes:
    """As ``--dry-run`` reads them from safetensors headers, which a model of random weights has not."""
    linears = {
        name.removesuffix(".base_layer"): (part.out_features, part.in_features)
        for name, part in family.transformer.named_modules()
        if isinstance(part, nn.Linear) and ".lora_" not in name
    }
    stored = as_stored(family.transformer, base_state(family.transformer))
    return ModelSizes(
        family.files.root,
        sum(math.prod(tensor.shape) for tensor in stored.values()),
        linears,
        dimensions=family.dimensions,
        video=family.video,
        vae_parameters=sum(parameter.numel() for parameter in family.vae.parameters()),
        text_encoder_parameters=0,
    )


def gpu_tests(lab: Lab) -> Outcome:
    """``pytest -m gpu``: how many tests failed."""
    lab.drop()
    where = Path(__file__).resolve().parents[2]
    log = lab.home / "pytest.log"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "--timeout", "120", *GPU_TESTS]
    with log.open("w", encoding="utf-8") as out:
        try:
            code: int | None = subprocess.run(
                command, cwd=where, stdout=out, stderr=subprocess.STDOUT, timeout=lab.budget_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    said = log.read_text(encoding="utf-8")
    ended = {
        word: re.findall(rf"^(\S+::\S+) {word}", said, re.MULTILINE)
        for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    wrong = ended["FAILED"] + ended["ERROR"]
    details: dict[str, object] = {word.lower(): len(names) for word, names in ended.items()}
    details |= {"exit_code": code, "wrong": wrong, "tail": said[-3000:]}
    if code is None and not wrong:
        raise RuntimeError(
            f"stopped after {lab.budget_s:.0f} s with {len(ended['PASSED'])} passed: {said[-300:]}"
        )
    if (
        (code == 1 and not wrong)
        or code not in (None, 0, 1)
        or (lab.device.type == "cuda" and not ended["PASSED"])
    ):
        raise RuntimeError(f"pytest ended with exit code {code}: {said[-600:]}")
    return Outcome(len(wrong), details)
