"""Weight slots in both forms: what runs, what trains, what blending and copying do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from spotlight.algorithms.base import Slot as AlgorithmSlot
from spotlight.models.family import ModelError
from spotlight.models.slots import CopySlots, LoraSlots, LoraSpec, Slot, WeightSlots
from spotlight.training.learner_state import Counters, load, save
from spotlight.training.sharding import Ranks

EXTRA: tuple[Slot, ...] = ("reference", "old", "ema")
FORMS = ("lora", "full")
SPEC = LoraSpec(rank=2, alpha=3.0, targets=("to_q", "net.2"), seed=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(5, 7)
        self.net = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.to_q(x))


def net(dtype: torch.dtype = torch.float32) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().to(dtype)


def build(form: str, module: nn.Module | None = None) -> WeightSlots:
    module = module or net()
    return LoraSlots(module, SPEC, EXTRA) if form == "lora" else CopySlots(module, EXTRA)


def filled(slots: WeightSlots, slot: Slot, seed: int) -> dict[str, Tensor]:
    """Random values for a slot, put there and returned."""
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(t.shape, generator=generator) for n, t in slots.state(slot).items()}
    slots.load_state(slot, values)
    return values


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def run(slots: WeightSlots, slot: Slot) -> Tensor:
    with torch.no_grad(), slots.use(slot) as module:
        return module(X)


def test_slot_names_are_the_algorithms() -> None:
    assert get_args(Slot) == get_args(AlgorithmSlot)


@pytest.mark.parametrize("form", FORMS)
def test_all_slots_start_as_the_model_given(form: str) -> None:
    expected = net()(X)
    slots = build(form)
    assert slots.slots == ("policy", "reference", "old", "ema")
    for slot in slots.slots:
        assert torch.equal(run(slots, slot), expected), slot


@pytest.mark.parametrize("form", FORMS)
def test_each_slot_runs_its_own_weights_and_the_reference_stays(form: str) -> None:
    start = net()(X)
    slots = build(form)
    for seed, slot in enumerate(("policy", "old", "ema")):
        filled(slots, slot, seed)
    outputs = {slot: run(slots, slot) for slot in slots.slots}
    assert torch.equal(outputs["reference"], start)
    for one in outputs:
        for two in outputs:
            assert (one == two) == torch.equal(outputs[one], outputs[two]), (one, two)


@pytest.mark.parametrize("form", FORMS)
def test_afterwards_the_policy_is_active_even_when_the_forward_fails(form: str) -> None:
    module = net()
    slots = build(form, module)
    filled(slots, "policy", 1)
    expected = run(slots, "policy")
    for slot in slots.slots:
        with pytest.raises(RuntimeError), slots.use(slot) as used:
            used(torch.zeros(4, 6))
        with torch.no_grad():
            assert torch.equal(module(X), expected), slot


@pytest.mark.parametrize("form", FORMS)
def test_only_the_policy_trains(form: str) -> None:
    slots = build(form)
    names = set(slots.trainable_parameters())
    for slot in slots.slots:
        with slots.use(slot) as module:
            loss = module(X).square().sum()
        if slot == "policy":
            loss.backward()
    for module in slots.modules().values():
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        assert trained <= {id(p) for p in slots.trainable_parameters().values()}
    assert all(p.requires_grad for p in slots.trainable_parameters().values())
    expected = {n for n in names if "lora_A" not in n}  # B is zero, so A has a zero gradient
    assert {
        n for n, p in slots.trainable_parameters().items() if p.grad is not None and p.grad.any()
    } == expected


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_policys_when_other_slots_run_between_forward_and_backward(form: str) -> None:
    slots = build(form)
    for seed, slot in enumerate(("policy", "old", "ema")):
        filled(slots, slot, seed)

    def gradients(*, interleaved: bool) -> dict[str, Tensor]:
        with slots.use("policy") as module:
            out = checkpoint(module, X, use_reentrant=False)  # backward runs the forward once more
        if interleaved:
            for slot in ("old", "reference", "ema"):
                run(slots, slot)
        parameters = slots.trainable_parameters()
        return dict(
            zip(parameters, torch.autograd.grad(out.square().sum(), list(parameters.values())), strict=True)
        )

    plain, interleaved = gradients(interleaved=False), gradients(interleaved=True)
    assert all(torch.equal(plain[name], interleaved[name]) for name in plain)
    assert all(gradient.any() for gradient in plain.values())


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(decay=st.floats(0.0, 1.0))
def test_blend_is_the_weighted_mean(form: str, decay: float) -> None:
    slots = build(form)
    dst, src = filled(slots, "ema", 1), filled(slots, "policy", 2)
    slots.blend("ema", "policy", decay)
    for name, value in slots.state("ema").items():
        expected = decay * dst[name].double() + (1 - decay) * src[name].double()
        assert torch.allclose(value.double(), expected, rtol=0, atol=1e-6)
    assert all(torch.equal(slots.state("policy")[name], src[name]) for name in src)


@pytest.mark.parametrize("form", FORMS)
def test_blend_is_exact_at_its_ends_and_refuses_the_rest(form: str) -> None:
    slots = build(form)
    dst, src = filled(slots, "old", 1), filled(slots, "policy", 2)
    slots.blend("old", "policy", 1.0)
    assert all(torch.equal(slots.state("old")[name], dst[name]) for name in dst)
    slots.blend("old", "policy", 0.0)
    assert all(torch.equal(slots.state("old")[name], src[name]) for name in src)
    with pytest.raises(ModelError, match=r"decay of policy into old is 1\.5; expected a value in \[0, 1\]"):
        slots.blend("old", "policy", 1.5)


@pytest.mark.parametrize("form", FORMS)
def test_copy_is_bitwise_and_by_value(form: str) -> None:
    slots = build(form)
    values = filled(slots, "policy", 1)
    slots.copy("old", "policy")
    filled(slots, "policy", 2)
    assert all(torch.equal(slots.state("old")[name], values[name]) for name in values)


@pytest.mark.parametrize("form", FORMS)
def test_state_that_does_not_fit_is_refused_and_nothing_written(form: str) -> None:
    slots = build(form)
    before = {name: tensor.clone() for name, tensor in slots.state("policy").items()}
    changed = {name: tensor + 1 for name, tensor in before.items()}
    last = list(before)[-1]
    lacking = {name: tensor for name, tensor in changed.items() if name != last}
    for state, message in (
        (lacking, "lacks 1 tensors, first"),
        ({**changed, "extra": torch.zeros(1)}, "has unknown 1 tensors, first 'extra'"),
        ({**changed, last: torch.zeros(9, 9)}, r"with shape \[9, 9\], expected"),
    ):
        with pytest.raises(ModelError, match=message):
            slots.load_state("policy", state)
        assert all(torch.equal(slots.state("policy")[name], before[name]) for name in before)


def test_slots_that_do_not_exist_are_refused() -> None:
    for slots in (LoraSlots(net(), SPEC), CopySlots(net())):
        with pytest.raises(ModelError, match=r"weight slot 'ema' does not exist; this run has policy"):
            slots.parameters("ema")
        with pytest.raises(ModelError, match="weight slot 'old' does not exist"), slots.use("old"):
            pass
    with pytest.raises(ModelError, match="unknown weight slot 'average'"):
        CopySlots(net(), ["average"])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="reference is the base without adapters"):
        LoraSlots(net(), SPEC).state("reference")


def test_lora_start_is_fixed_by_its_seed_alone() -> None:
    torch.manual_seed(0)
    one = LoraSlots(net(), SPEC, EXTRA).state("policy")
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    two = LoraSlots(net(), SPEC).state("policy")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = LoraSlots(net(), LoraSpec(SPEC.rank, SPEC.alpha, SPEC.targets, seed=5)).state("policy")
    assert not torch.equal(one["to_q.lora_A.weight"], other["to_q.lora_A.weight"])
    assert one["to_q.lora_A.weight"].abs().max() <= 5**-0.5
    wide = LoraSlots(net(), LoraSpec(400, 400.0, SPEC.targets, seed=4, init="gaussian")).state("policy")
    assert wide["to_q.lora_A.weight"].std().item() == pytest.approx(1 / 400, rel=0.1)
    assert not wide["to_q.lora_B.weight"].any()


def trained_scalars(slots: WeightSlots) -> int:
    return sum(parameter.numel() for parameter in slots.trainable_parameters().values())


def test_counts() -> None:
    lora, full = build("lora"), build("full")
    assert lora.modules_bound == 2
    assert trained_scalars(lora) == 2 * (5 + 7) + 2 * (7 + 3)
    assert full.modules_bound == 2
    assert trained_scalars(full) == 5 * 7 + 7 + 7 * 3 + 3


@pytest.mark.parametrize("form", FORMS)
def test_merged_state_is_the_slot_in_a_plain_module(form: str) -> None:
    slots = build(form)
    for seed, slot in enumerate(("policy", "old", "ema")):
        filled(slots, slot, seed)
    for slot in slots.slots:
        plain = Net()
        plain.load_state_dict(slots.merged_state(slot))
        assert torch.allclose(plain(X), run(slots, slot), rtol=0, atol=1e-5), slot


def test_full_fine_tuning_of_half_precision_weights_is_refused() -> None:
    with pytest.raises(ModelError, match=r"needs float32 weights, but to_q\.weight is torch\.bfloat16"):
        CopySlots(net(torch.bfloat16))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", FORMS)
def test_slots_work_on_sharded_modules(form: str) -> None:
    plain, sharded = build(form), build(form)
    for module in sharded.modules().values():
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(module, mesh=mesh)
    for slots in (plain, sharded):
        run(slots, "old")  # FSDP sets itself up in this forward, with the policy inactive
        filled(slots, "policy", 1)
        filled(slots, "old", 2)
        slots.blend("old", "policy", 0.25)
        slots.copy("ema", "old")
        with slots.use("policy") as module:
            module(X).square().sum().backward()
    for slot in plain.slots:
        assert torch.allclose(run(sharded, slot), run(plain, slot), rtol=0, atol=1e-6), slot
        with torch.no_grad(), sharded.use(slot, merged=True) as module:  # not at hand: runs unmerged
            assert torch.equal(module(X), run(sharded, slot)), slot
        merged = sharded.merged_state(slot)
        assert all(torch.equal(value, merged[name]) for name, value in plain.merged_state(slot).items())
        assert sharded.merged_state(slot, keep=False) == {}
    theirs = sharded.trainable_parameters()
    for name, parameter in plain.trainable_parameters().items():
        assert torch.allclose(theirs[name].grad.full_tensor(), parameter.grad, rtol=1e-5, atol=1e-5), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_slot_is_known_to_be_the_policy_until_either_is_written(
    form: str, sharded: bool, tmp_path: Path
) -> None:
    slots = build(form)
    assert slots.equals_policy("old")
    for module in slots.modules().values() if sharded else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(slots.trainable_parameters().values())
    filled(slots, "policy", 1)
    filled(slots, "old", 2)
    save(tmp_path, slots, optimizer, Counters(0, 0), Ranks())
    for write in (
        lambda: filled(slots, "policy", 1),
        lambda: filled(slots, "old", 2),
        lambda: slots.blend("old", "policy", 0.5),
        lambda: load(tmp_path, slots, optimizer),
    ):
        slots.blend("old", "policy", 0.0)
        run(slots, "old")
        assert slots.equals_policy("old")
        assert not slots.equals_policy("ema")
        write()
        assert not slots.equals_policy("old")


def bare(module: nn.Module) -> dict[str, Tensor]:
    """Values of the module's own weights, and where they lie."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if "lora" not in n}


@pytest.mark.parametrize("form", FORMS)
def test_merged_slots_run_the_same_weights_and_leave_the_base_bitwise(form: str) -> None:
    module = net()
    slots = build(form, module)
    for seed, slot in enumerate(("policy", "old", "ema")):
        filled(slots, slot, seed)
    before, outputs = bare(module), {slot: run(slots, slot) for slot in slots.slots}
    places = {n: p.data_ptr() for n, p in module.named_parameters()}
    for slot in slots.slots:
        with slots.use(slot, merged=True) as used, torch.no_grad():
            torch.testing.assert_close(used(X), outputs[slot], rtol=0, atol=1e-5)
            assert slot != "reference" or torch.equal(used(X), outputs[slot])
        with pytest.raises(RuntimeError), slots.use(slot, merged=True) as used:
            used(torch.zeros(4, 6))
    assert all(torch.equal(value, before[name]) for name, value in bare(module).items())
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == places
    for slot in slots.slots:
        assert torch.equal(run(slots, slot), outputs[slot])
    with slots.use("policy") as used:
        assert used(X).requires_grad  # gradients are on again


def test_merged_lora_runs_the_base_layers_alone() -> None:
    slots = LoraSlots(net(), SPEC, EXTRA)
    filled(slots, "old", 1)
    calls: list[str] = []
    for name, part in slots.modules()["policy"].named_modules():
        if ".lora_B." in name:
            part.register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    with slots.use("old", merged=True) as module:
        out = module(X)
        assert not out.requires_grad
        # A worker holds slots open between its turns: what its thread does meanwhile may need gradients.
        assert torch.is_grad_enabled()
    assert not calls
    run(slots, "old")
    assert [name.rpartition(".")[2] for name in calls] == ["old", "old"]


def test_half_precision_weights_are_not_merged() -> None:
    slots = LoraSlots(net(torch.bfloat16), SPEC, EXTRA)
    filled(slots, "old", 1)
    with torch.no_grad(), slots.use("old") as module:
        expected = module(X.bfloat16())
    with torch.no_grad(), slots.use("old", merged=True) as module:
        assert torch.equal(module(X.bfloat16()), expected)


# -- adapters applied in the base's dtype --------------------------------------------------------------

HALF_X = X.bfloat16()


def half(compute: torch.dtype | None) -> LoraSlots:
    slots = LoraSlots(net(torch.bfloat16), SPEC, EXTRA, compute=compute)
    for seed, slot in enumerate(("policy", "old", "ema")):
        filled(slots, slot, seed)
    return slots


def applied(slots: LoraSlots) -> list[Tensor]:
    """The copies that layers apply."""
    found = [getattr(part, "applied", None) for part in slots.modules()["policy"].modules()]
    return [copy for copy in found if copy is not None]


def half_run(slots: LoraSlots, slot: Slot) -> Tensor:
    """Under autocast unless the slots need none."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=slots.compute is None)
    with torch.no_grad(), autocast, slots.use(slot) as module:
        return module(HALF_X)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_copies_of_adapters_equal_autocast_bit_for_bit(again: bool) -> None:
    outputs, gradients = [], []
    for compute in (None, torch.bfloat16):
        slots = half(compute)
        outputs.append([half_run(slots, slot) for slot in slots.slots])
        for _ in range(3):  # as micro-batches do, with other slots in between
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute is None)
            with autocast, slots.use("policy") as module:
                out = checkpoint(module, HALF_X, use_reentrant=False) if again else module(HALF_X)
            half_run(slots, "old")
            half_run(slots, "policy")
            out.float().square().sum().backward()
        gradients.append({name: p.grad for name, p in slots.trainable_parameters().items()})
    assert all(map(torch.equal, *outputs))
    under, copied = gradients
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in copied.values())
    assert all(torch.equal(gradient, under[name]) for name, gradient in copied.items())


def test_copies_follow_every_write_at_the_same_addresses() -> None:
    slots = half(torch.bfloat16)
    before = {slot: half_run(slots, slot) for slot in slots.slots}
    copies = applied(slots)
    assert len(copies) == 3 * 2 * slots.modules_bound
    places = [copy.data_ptr() for copy in copies]

    def expected(slot: Slot) -> Tensor:
        other = half(torch.bfloat16)
        other.load_state(slot, slots.state(slot))
        return half_run(other, slot)

    filled(slots, "policy", 9)
    slots.blend("old", "policy", 0.5)
    slots.copy("ema", "policy")
    for slot in ("policy", "old", "ema"):
        assert not torch.equal(half_run(slots, slot), before[slot])
        assert torch.equal(half_run(slots, slot), expected(slot))
    with torch.no_grad():
        for tensor in slots.state("policy").values():  # as a checkpoint is read
            tensor.mul_(1.5)
    assert torch.equal(half_run(slots, "policy"), expected("policy"))
    assert [copy.data_ptr() for copy in copies] == places
    assert {p.dtype for p in slots.parameters("policy").values()} == {torch.float32}


def test_layers_of_another_type_than_adapters_compute_in_are_refused() -> None:
    with pytest.raises(ModelError, match=r"targets: 'to_q' is torch\.float32.*set learner\.autocast=none"):
        LoraSlots(net(), SPEC, compute=torch.bfloat16)


@pytest.mark.usefixtures("one_rank")
def test_sharded_adapters_are_gathered_in_the_dtype_and_have_no_copies() -> None:
    plain, sharded = half(torch.bfloat16), half(torch.bfloat16)
    half_run(sharded, "old")  # makes copies, which sharding must not leave behind
    module = sharded.modules()["policy"]
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    for slots in (plain, sharded):
        filled(slots, "old", 7)
        for _ in range(2):
            with slots.use("policy") as used:
                used(HALF_X).float().square().sum().backward()
    for slot in plain.slots:
        assert torch.equal(half_run(sharded, slot), half_run(plain, slot)), slot
    theirs = sharded.trainable_parameters()
    for name, parameter in plain.trainable_parameters().items():
        assert torch.equal(theirs[name].grad.full_tensor(), parameter.grad), name
    assert applied(plain)
    assert not applied(sharded)
