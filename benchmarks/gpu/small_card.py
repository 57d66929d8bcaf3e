"""Rows about consumer GPUs: a base in few bits under the memory that they have.

What a process may allocate is capped at 90 % of a card's: CUDA's context is not counted. In int8, 14.4 GiB
hold 27 of Qwen-Image's layers with adapters of rank 64, their gradients and the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.gpu import lab as model
from benchmarks.gpu.correct import learning, planned_parts, planned_run, worst
from benchmarks.gpu.lab import Lab, Shape
from benchmarks.gpu.suite import Outcome, Skip
from benchmarks.gpu.timing import interleaved, medians, spread
from spotlight.dry_run.memory_plan import phase_bytes
from spotlight.models.shared.quantised import Quantize
from spotlight.training.device_memory import measure_peak, release

STEPS = 4
_GIB = 2.0**30
CARDS: Mapping[Quantize, tuple[int, float]] = {"nf4": (60, 21.6), "int8": (24, 14.4)}
"""Layers of the model, and GiB that a process may allocate."""


def nf4_in_24(lab: Lab) -> Outcome:
    """The whole model in NF4 below 21.6 GiB: see :func:`_peaks`."""
    return _peaks(lab, "nf4")


def int8_in_16(lab: Lab) -> Outcome:
    """Part of it in int8 below 14.4 GiB: see :func:`_peaks`."""
    return _peaks(lab, "int8")


def _peaks(lab: Lab, quantize: Quantize) -> Outcome:
    """Rollouts of four, and updates of one: largest relative error of ``--dry-run``'s peaks.

    Both once the optimizer has its state, as the plan has it, which after a run's first update it keeps.
    """
    small, one = lab.scale.train_small, _one(lab.scale.train_small)
    layers, gib = CARDS[quantize]
    layers = min(layers, lab.scale.layers)
    with below(lab, gib):
        family = lab.fresh(layers, quantize=quantize)
        slots = lab.adapted(family)
        config = planned_run(lab, layers, small, micro_batch=1, quantize=quantize)
        plan = phase_bytes(planned_parts(lab, family, config, small))
        loaded = _held(lab)
        samples = lab.samples(family, slots, small, STEPS)
        learner = lab.learner(family, slots, one, recompute="blocks")
        model.train(learner, samples[:1])
        held = _held(lab)
        _, denoising = measure_peak(lab.device, lambda: lab.samples(family, slots, small, STEPS))
        _, training = measure_peak(lab.device, lambda: model.train(learner, samples[1:2]))
    measured = {"rollouts": held + denoising, "training": held + training}
    planned = {"rollouts": max(plan["denoising"], plan["decoding"]), "training": plan["training"]}
    errors = {phase: planned[phase] / found - 1 for phase, found in measured.items()}
    return Outcome(
        worst(map(abs, errors.values())),
        {
            "layers": layers,
            "cap_gib": gib,
            "loaded_gib": loaded / _GIB,
            **{
                phase: {"plan_gib": planned[phase] / _GIB, "measured_gib": found / _GIB}
                for phase, found in measured.items()
            },
        },
    )


@contextmanager
def below(lab: Lab, gib: float) -> Iterator[None]:
    """Let this process allocate no more within; nothing is capped on a CPU."""
    lab.drop()
    if lab.device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(lab.device).total_memory
    if gib * _GIB >= total:
        raise Skip(f"this GPU has {total / _GIB:.1f} GiB; expected more than {gib}")
    release(lab.device)
    torch.cuda.set_per_process_memory_fraction(gib * _GIB / total, lab.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, lab.device)


def replay(lab: Lab) -> Outcome:
    """Log-probs of the learner's first forward against those of the rollout, at equal batch, few layers."""
    lab.drop()
    shape = _one(lab.scale.train_small)
    found: dict[str, float] = {}
    for quantize in ("nf4", "int8"):
        family = lab.fresh(lab.scale.few_layers, quantize=quantize)
        slots = lab.adapted(family)
        samples = lab.samples(family, slots, shape, STEPS)
        with learning(lab, family, slots, shape) as learner:
            report = model.train(learner, samples)
        found |= {f"{quantize} {name}": value for name, value in report.items() if name.startswith("replay/")}
    if not found:
        raise RuntimeError("the learner reports no replay difference")
    return Outcome(worst(found.values()), found)


def nf4_forward(lab: Lab) -> Outcome:
    """Seconds of a forward with adapters, of those in bfloat16, few layers."""
    return _forward(lab, "nf4")


def int8_forward(lab: Lab) -> Outcome:
    """The same in int8."""
    return _forward(lab, "int8")


def _forward(lab: Lab, quantize: Quantize) -> Outcome:
    lab.drop()
    layers, shape = lab.scale.few_layers, lab.scale.train_small

    def forward(kind: Quantize) -> Callable[[], object]:
        family = lab.fresh(layers, quantize=kind)
        slots = lab.adapted(family)

        def run() -> object:
            with slots.use("policy", merged=True) as module:
                return lab.velocity(family, module, shape)

        return run

    seconds = interleaved(lab, {kind: forward(kind) for kind in (quantize, "none")})
    middle = medians(seconds)
    return Outcome(middle[quantize] / middle["none"], {"layers": layers, **spread(seconds)})


def _one(shape: Shape) -> Shape:
    return Shape(shape.side_px, 1, shape.text)


def _held(lab: Lab) -> int:
    return torch.cuda.memory_allocated(lab.device) if lab.device.type == "cuda" else 0
