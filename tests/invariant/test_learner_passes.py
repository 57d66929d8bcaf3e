"""Several timesteps in one pass: the same gradients, within memory, and nothing lost where it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import World, algorithm, cut, gradients, make_learner, roll_out, train_batch
from tiny_policy import TinyPolicy, rollout
from torch import Tensor

from spotlight.algorithms import Algorithm, LossTerms, TrainBatch, build_algorithm
from spotlight.config.sections.algorithm import AWMConfig
from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.diffusion.samplers import CPS, ODE, FlowSDE
from spotlight.registry import ALGORITHMS
from spotlight.scheduler.types import Phase
from spotlight.training.device_memory import free_bytes, measure_peak
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.settings import TrainingError, traced_phases
from spotlight.training.timesteps import cut_timesteps
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.device_errors import is_out_of_memory

NAMES = ("flow-grpo", "flow-grpo-fast", "grpo-guard", "diffusion-nft", "awm")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"), layers=1)


def made_of(name: str, timesteps: int = 3) -> tuple[Any, dict[str, Any]]:
    """The algorithm, with every term of its loss."""
    params: dict[str, Any] = {"train_timesteps": timesteps}
    if name.startswith("flow"):
        params |= {"kl_weight": 0.04}
    sampler = {"flow-grpo-fast": CPS(0.8), "diffusion-nft": ODE(), "awm": ODE()}.get(name, FlowSDE(0.7))
    return sampler, params


# -- the maths -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    timesteps=st.integers(1, 5),
    per_pass=st.integers(1, 6),
    batch=st.integers(1, 4),
)
def test_rows_of_several_timesteps_have_the_losses_and_the_gradient_of_single_steps(
    name: str, timesteps: int, per_pass: int, batch: int
) -> None:
    sampler, params = made_of(name, timesteps)
    algo, policy = build_algorithm(ALGORITHMS.load(name)(**params), sampler), TinyPolicy()
    samples = rollout(policy, sampler, batch=batch)
    for slot in ("old", "reference"):
        policy.nudge(0.05, slot, seed=len(slot))
    single = [range(timestep, timestep + 1) for timestep in range(timesteps)]
    several = cut_timesteps(range(timesteps), per_pass)
    expected, found = (old_log_probs(algo, policy, samples, cuts) for cuts in (single, several))
    assert (expected is None) == (found is None) == (not name.startswith("flow"))
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        samples = replace(samples, old_log_probs=expected.view(timesteps, batch).T)
    policy.nudge(1e-5)
    one, more = (losses(algo, policy, samples, cuts) for cuts in (single, several))
    torch.testing.assert_close(more.per_sample, one.per_sample, rtol=1e-4, atol=1e-5)
    gradients_ = [policy.gradient(terms.per_sample.mean()) for terms in (more, one)]
    torch.testing.assert_close(*gradients_, rtol=1e-3, atol=1e-6)
    for metric, values in one.metrics.items():
        torch.testing.assert_close(more.metrics[metric], values, rtol=1e-3, atol=1e-5)
    if one.kept_step is not None:
        assert more.kept_step is not None
        assert torch.equal(more.kept_step, one.kept_step)


def old_log_probs(
    algo: Algorithm, policy: TinyPolicy, samples: TrainBatch, cuts: list[range]
) -> Tensor | None:
    rows = [
        algo.old_log_probs(policy, samples.repeated(len(part)), at(part, len(samples.seeds))) for part in cuts
    ]
    found = [row.detach() for row in rows if row is not None]
    return torch.cat(found) if found else None


def losses(algo: Algorithm, policy: TinyPolicy, samples: TrainBatch, cuts: list[range]) -> LossTerms:
    """Of all passes, one after the other."""
    batch = len(samples.seeds)
    terms = [algo.loss(policy, samples.repeated(len(part)), at(part, batch)) for part in cuts]
    steps = [term.kept_step for term in terms if term.kept_step is not None]
    return LossTerms(
        torch.cat([term.per_sample for term in terms]),
        {name: torch.cat([term.metrics[name] for term in terms]) for name in terms[0].metrics},
        torch.cat(steps) if steps else None,
    )


def at(part: range, batch: int) -> list[int]:
    return [timestep for timestep in part for _ in range(batch)]


def test_rows_and_timesteps_must_match() -> None:
    algo = build_algorithm(AWMConfig(), ODE())
    with pytest.raises(ValueError, match="2 training timesteps for a batch of 6 rows; expected 6"):
        algo.loss(TinyPolicy(), rollout(TinyPolicy(), ODE()), [0, 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda terms: {"per_sample": terms.per_sample.expand(16, -1).T}, r"per_sample of shape \[3, 16\]"),
        (lambda terms: {"per_sample": terms.per_sample[:1]}, r"per_sample of shape \[1\]; expected \[3\]"),
        (lambda terms: {"per_sample": terms.per_sample.mean()}, r"per_sample of shape \[\]"),
        (lambda terms: {"per_sample": terms.per_sample.detach()}, "per_sample without gradient"),
        (lambda terms: {"metrics": {"kl": torch.ones(())}}, r"metrics\['kl'\] of shape \[\]"),
        (lambda terms: {"metrics": {"kl": 1.0}}, r"metrics\['kl'\] of type 'float'"),
    ],
)  # fmt: skip
def test_a_loss_that_is_not_one_value_a_row_is_an_error(
    world: World, change: Callable[[LossTerms], dict[str, Any]], said: str
) -> None:
    learner = make_learner(world, algorithm("awm"), timesteps_per_pass=1)
    samples, sound = roll_out(world, learner), learner.algorithm.loss
    learner.passes._algorithm = SimpleNamespace(
        name="mine", loss=lambda *given: (terms := sound(*given), replace(terms, **change(terms)))[1]
    )  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=f"'mine': its loss returned a {said}"):
        train_batch(learner, samples, 3)


# -- through the learner -------------------------------------------------------------------------------


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    floor = 1e-5 * max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        atol = max(1e-4 * gradient.abs().max().item(), floor)
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_depend_on_the_timesteps_of_a_pass(world: World, name: str) -> None:
    """Three timesteps: 2 do not divide them, 3 do, 5 are more than there are."""
    timesteps = 2 if name == "flow-grpo-fast" else 3
    _, params = made_of(name, timesteps)
    samples: list[TrainingSample] = []
    found = []
    for per_pass in (1, 2, 3, 5):
        learner = make_learner(world, algorithm(name, **params), timesteps_per_pass=per_pass)
        samples = samples or roll_out(world, learner)
        with counted(learner) as rows:
            found.append(gradients(learner, samples, 3))
        # Two micro-batches of three samples, each in as few passes as can be.
        assert rows.count("backward") == 2 * -(-timesteps // per_pass)
    for other in found[1:]:
        assert_same(other, found[0])


@contextmanager
def counted(learner: Learner) -> Iterator[list[str]]:
    """Forwards with gradient, as the transformer sees them."""
    seen: list[str] = []

    def note(*_: object) -> None:
        seen.append("backward" if torch.is_grad_enabled() else "frozen")

    with learner.slots.use("policy") as module:
        handle = module.register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("per_pass", [2, pytest.param(3, marks=pytest.mark.slow), "auto"])
def test_the_first_ratio_is_bitwise_1_and_metrics_are_those_of_single_steps(
    world: World, per_pass: int | str
) -> None:
    reports = []
    samples: list[TrainingSample] = []
    for setting in (1, per_pass):
        learner = make_learner(world, algorithm("flow-grpo"), timesteps_per_pass=setting)
        samples = samples or roll_out(world, learner)
        reports.append(train_batch(learner, samples, 3).sums)
    one, more = reports
    assert more.ratio_max == 1.0
    assert more.means["ratio_deviation"] == 0.0
    assert more.samples == one.samples
    assert more.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert more.means["log_prob"] == pytest.approx(one.means["log_prob"], rel=1e-4)
    assert more.replay_difference.keys() == one.replay_difference.keys()


# -- memory --------------------------------------------------------------------------------------------


def measured(learner: Learner, samples: list[TrainingSample], per_pass: int) -> int:
    """Bytes at the peak of a micro-batch of three in passes of ``per_pass`` timesteps."""
    learner.prepare(samples, cut(samples, 3))
    keys = cut(samples, 3)[0]
    bound = learner._bind(learner._mine(keys), keys)
    _, peak = measure_peak(torch.device("cpu"), lambda: learner.passes._trial(bound, per_pass))
    learner.optimizer.zero_grad()
    learner.finish_batch()
    return peak


@pytest.mark.parametrize("auto", ["timesteps_per_pass", "recompute"])
def test_passes_that_only_measure_are_no_work(world: World, auto: str) -> None:
    found = []
    for chosen in ({}, {auto: "auto"}):
        learner = make_learner(world, algorithm("flow-grpo"), **{"timesteps_per_pass": 1, **chosen})
        log = learner.log = mock.Mock(wraps=learner.log)
        train_batch(learner, roll_out(world, learner), 3)
        found.append(log.worked.call_args.args[1])
    assert found[0].timesteps > 0
    assert found[0] == found[1]


def test_profiling_leaves_out_what_measures_by_a_profiler_itself() -> None:
    notes: list[str] = []
    cpu, cuda, auto = torch.device("cpu"), torch.device("cuda"), LearnerConfig(recompute="auto")
    both = [Phase.ROLLOUT, Phase.TRAINING]
    assert traced_phases(auto, cuda, notes.append) == both
    assert traced_phases(LearnerConfig(timesteps_per_pass=2), cpu, notes.append) == both
    assert not notes
    assert traced_phases(auto, cpu, notes.append) == both[:1]
    assert "learner.recompute" in notes[0]


@pytest.mark.parametrize("largest", [(3,), pytest.param((1, 2, 6), marks=pytest.mark.slow)])
def test_auto_takes_the_largest_pass_within_the_budget_and_remembers_it(
    world: World, largest: tuple[int, ...]
) -> None:
    algo = algorithm("awm", train_timesteps=6)
    learner = make_learner(world, algo)
    samples = roll_out(world, learner)
    one, six = (measured(learner, samples, per_pass) for per_pass in (1, 6))
    assert 4 * one < six < 6.2 * one
    three = one + (six - one) * 2 / 5
    budgets = {1: one / 2, 2: three * 0.95, 3: three * 1.05, 6: six * 1.05}
    expected_gradients = gradients(make_learner(world, algo), samples, 3)
    for expected in largest:
        budget = budgets[expected]
        learner = make_learner(world, algo, timesteps_per_pass="auto", pass_memory_bytes=int(budget))
        found = gradients(learner, samples, 3)
        rows = [trial.rows for trial in learner.passes.memory.trials]
        assert max(rows) == 3 * expected
        learner.step()
        learner.finish_batch()
        with counted(learner) as seen:
            assert train_batch(learner, samples, 3).timesteps_per_pass == expected
        assert seen.count("backward") == 2 * (6 // expected)
        assert [trial.rows for trial in learner.passes.memory.trials] == rows
        assert_same(found, expected_gradients)


def test_without_a_budget_auto_takes_what_is_free(world: World) -> None:
    assert free_bytes(torch.device("cpu")) > 2**24
    learner = make_learner(world, algorithm("flow-grpo"), timesteps_per_pass="auto")
    samples = roll_out(world, learner)
    gradients(learner, samples, 3)
    assert max(trial.rows for trial in learner.passes.memory.trials) == 9


@contextmanager
def runs_out(learner: Learner, rows_max: int, *, when: str) -> Iterator[list[int]]:
    """The device is out of memory for passes of more rows, in the forward or half-way in the backward."""
    failed: list[int] = []

    def fail(rows: int) -> None:
        failed.append(rows)
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def check(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rows = kwargs["hidden_states"].shape[0] if "hidden_states" in kwargs else args[0].shape[0]
        if rows <= rows_max or torch.is_grad_enabled() == (when == "frozen"):
            return
        if when != "backward":
            fail(rows)
        (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: fail(rows))

    with learner.slots.use("policy") as module:
        # Before the gradient reaches the attention, the MLP after it has got its own.
        block = module.transformer_blocks[0].attn if when == "backward" else module  # type: ignore[index, union-attr]
        handle = block.register_forward_hook(check, with_kwargs=True)
    try:
        yield failed
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("flow-grpo", "backward"),
        ("diffusion-nft", "forward"),
        pytest.param("flow-grpo", "forward", marks=pytest.mark.slow),
        pytest.param("diffusion-nft", "backward", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_while_learning_what_fits_halves_the_pass(world: World, name: str, when: str) -> None:
    algo = algorithm(name, train_timesteps=3)
    plain = make_learner(world, algo)
    samples = roll_out(world, plain)
    expected = gradients(plain, samples, 3)
    learner = make_learner(world, algo, timesteps_per_pass="auto", pass_memory_bytes=2**40)
    with runs_out(learner, 5, when=when) as failed:
        assert_same(gradients(learner, samples, 3), expected)
        assert learner.step().sums.samples == 6
        learner.finish_batch()
        train_batch(learner, samples, 3)
    assert failed == [9]


def test_where_not_even_one_timestep_fits_the_error_is_the_devices(world: World) -> None:
    learner = make_learner(world, algorithm("awm"), timesteps_per_pass="auto", pass_memory_bytes=2**40)
    samples = roll_out(world, learner)
    learner.prepare(samples, [])
    with runs_out(learner, 0, when="forward"), pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        learner.accumulate(cut(samples, 3)[0], 6)


def test_after_a_back_off_the_ratio_is_still_bitwise_1(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo"), timesteps_per_pass="auto", pass_memory_bytes=2**40)
    samples = roll_out(world, learner)
    micro_batches = cut(samples, 3)
    learner.prepare(samples, micro_batches)
    with runs_out(learner, 5, when="backward") as failed:
        for keys in micro_batches:
            learner.accumulate(keys, 6)
    assert failed == [9]
    sums = learner.step().sums
    assert sums.ratio_max == 1.0
    assert sums.means["ratio_deviation"] == 0.0


def test_old_log_probs_that_run_out_of_memory_are_made_in_smaller_passes(world: World) -> None:
    learner = make_learner(world, algorithm("flow-grpo"), timesteps_per_pass="auto", pass_memory_bytes=2**40)
    samples = roll_out(world, learner)
    first, second = cut(samples, 3)
    learner.prepare(samples, [first, second])
    learner.accumulate(first, 3)  # learns that all three timesteps fit
    with runs_out(learner, 5, when="frozen") as failed:
        learner.step()
        learner.accumulate(second, 3)
    assert failed == [9]
    assert learner.step().timesteps_per_pass == 1  # in the passes that made them


def test_gradients_before_a_dropped_pass_stay_to_the_bit(world: World) -> None:
    learner = make_learner(
        world, algorithm("diffusion-nft"), timesteps_per_pass="auto", pass_memory_bytes=2**40
    )
    samples = roll_out(world, learner)
    first, second = cut(samples, 3)
    learner.prepare(samples, [first, second])
    learner.accumulate(first, 6)
    parameters = learner.slots.trainable_parameters()
    before = {name: parameter.grad for name, parameter in parameters.items()}
    values = {name: None if grad is None else grad.clone() for name, grad in before.items()}
    bound = learner._bind(learner._mine(second), second)
    with runs_out(learner, 5, when="backward") as failed:
        assert learner.passes._recoverably(bound, range(2), 1.0) is None
    assert failed == [6]
    for name, parameter in parameters.items():
        assert parameter.grad is before[name]
        value = values[name]
        if value is not None:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, value)


def test_a_fixed_number_of_timesteps_that_does_not_fit_is_an_error(world: World) -> None:
    learner = make_learner(world, algorithm("diffusion-nft"), timesteps_per_pass=2)
    samples = roll_out(world, learner)
    learner.prepare(samples, [])
    with runs_out(learner, 5, when="forward"), pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        learner.accumulate(cut(samples, 3)[0], 6)


def test_a_failed_allocation_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    for no_memory in (
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),  # of segments that grow
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        assert is_out_of_memory(no_memory)
    for other in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        ModelError("the key cannot be true: CUDA error: out of memory"),  # has its own remedy
    ):
        assert not is_out_of_memory(other)


def test_the_peak_is_measured_to_the_byte_and_proportional_to_rows() -> None:
    layer = torch.nn.Linear(64, 64)
    peaks = []
    for rows in (100, 200):
        x = torch.randn(rows, 64)
        layer(x).sum().backward()
        peaks.append(measure_peak(torch.device("cpu"), lambda x=x: layer(x).sum().backward())[1])  # type: ignore[misc]
    assert peaks[1] - peaks[0] == pytest.approx(100 * 64 * 4, rel=0.1)
