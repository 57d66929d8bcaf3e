"""Bundles: what is bound is what was packed, byte for byte; else nothing is written, and it is said why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import CopySlots, LoraSlots, WeightSlots
from spotlight_weights import bundle
from spotlight_weights.bundle import Bindable, WeightsManifest, _header, bind, content_digest, pack, read
from spotlight_weights.weight_errors import WeightsError

SLOTS = ("policy", "old")


class Net(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.to_q = nn.Linear(5, width)
        self.to_k = nn.Linear(width, 3)


def make(form: str = "lora", width: int = 7, targets: tuple[str, ...] = ("to_q", "to_k")) -> WeightSlots:
    if form == "full":
        return CopySlots(Net(width), ["old"])
    return LoraSlots(Net(width), LoraSpec(rank=2, alpha=4.0, targets=targets), ["old"])


def learnt(form: str = "lora") -> WeightSlots:
    slots = make(form)
    for slot in SLOTS:
        slots.load_state(slot, {n: torch.randn_like(t) for n, t in slots.state(slot).items()})  # type: ignore[arg-type]
    return slots


def contents(slots: WeightSlots) -> dict[str, dict[str, Tensor]]:
    return {slot: {n: t.clone() for n, t in slots.state(slot).items()} for slot in SLOTS}  # type: ignore[arg-type]


def published(slots: WeightSlots, version: int = 3) -> tuple[WeightsManifest, bytearray]:
    return pack(version, 0, contents(slots), slots.modules_bound)


def same(one: Mapping[str, Mapping[str, Tensor]], two: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return one.keys() == two.keys() and all(
        one[slot].keys() == two[slot].keys()
        and all(torch.equal(one[slot][n], two[slot][n]) for n in one[slot])
        for slot in one
    )


def refused(
    manifest: WeightsManifest, data: bytes | bytearray, target: WeightSlots, needs: tuple[str, ...] = ()
) -> str:
    """What binding says; nothing may have been written."""
    before = contents(target)
    with pytest.raises(WeightsError) as caught:
        bind(read(manifest, data), target, needs=needs)
    assert same(before, contents(target))
    return str(caught.value)


@pytest.mark.parametrize("form", ["lora", "full"])
def test_what_is_bound_is_what_was_packed(form: str) -> None:
    source, target = learnt(form), make(form)
    manifest, data = published(source)
    assert manifest.bytes == len(data)
    assert manifest.modules_bound == source.modules_bound == 2
    assert not same(contents(source), contents(target))
    bind(read(manifest, data), target, needs=SLOTS)
    assert same(contents(source), contents(target))
    conforms: Bindable = target
    bind(read(manifest, data), conforms)


def test_the_digest_is_of_the_content_and_of_nothing_else() -> None:
    source = learnt()
    manifest, data = published(source)
    again, twin = pack(9, 4, contents(source), source.modules_bound)
    assert (again.digest, twin) == (manifest.digest, data)
    backwards = {
        slot: dict(reversed(tensors.items())) for slot, tensors in reversed(contents(source).items())
    }
    assert pack(3, 0, backwards, 2)[0].digest == manifest.digest
    changed = contents(source)
    next(iter(changed["old"].values())).view(-1)[0] += 1e-3
    renamed = {"policy": contents(source)["policy"], "ema": contents(source)["old"]}
    reshaped = contents(source)
    first = next(iter(reshaped["old"]))
    reshaped["old"][first] = reshaped["old"][first].reshape(-1)
    recast = contents(source)
    recast["old"][first] = recast["old"][first].view(torch.int32)
    others = {pack(3, 0, c, 2)[0].digest for c in (changed, renamed, reshaped, recast)}
    assert len(others | {manifest.digest}) == 5


def test_a_manifest_travels_as_json() -> None:
    manifest, _ = published(learnt())
    assert WeightsManifest.from_json(manifest.to_json()) == manifest
    for text in ("", "[]", "{}", manifest.to_json().replace("lineage", "age")):
        with pytest.raises(WeightsError, match="expected a JSON object with version, lineage, digest"):
            WeightsManifest.from_json(text)


@settings(max_examples=60)
@given(st.data())
def test_no_damaged_byte_is_ever_bound(data: st.DataObject) -> None:
    source = learnt()
    manifest, whole = published(source)
    body = bytearray(whole)
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    target = make()
    before = contents(target)
    try:
        bind(read(manifest, bytes(body)), target)
    except WeightsError:
        assert same(before, contents(target))
    else:  # a blank in the header's JSON became another blank
        assert whole[position : position + 1].isspace()
        assert same(contents(source), contents(target))


@settings(max_examples=25)
@given(cut=st.integers(0, 10_000))
def test_no_cut_bundle_is_ever_bound(cut: int) -> None:
    manifest, whole = published(learnt())
    said = refused(manifest, whole[: cut % len(whole)], make())
    assert f"expected {len(whole)}" in said
    shorter = dataclasses.replace(manifest, bytes=cut % len(whole))
    assert "found digest" in refused(shorter, whole[: cut % len(whole)], make())


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"\1",
        b"[]",
        b"{}",
        b'{"policy/w": {"dtype": "F32", "shape": [2]}}',
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(_header(["policy/w"], [(torch.float32, (-1, -1))])[8:], id="negative"),
        pytest.param(
            _header([*"abc"], [(torch.uint8, (1,)), (torch.int16, (1,)), (torch.uint8, (1,))])[8:], id="askew"
        ),
    ],
)
def test_a_header_that_does_not_describe_its_bytes_is_refused(forged: bytes) -> None:
    data = len(forged).to_bytes(8, "little") + forged + bytes(4)
    manifest = WeightsManifest(3, 0, content_digest(data), 2, ("policy",), len(data))
    assert "are no bundle" in refused(manifest, data, make())


def test_what_is_staged_in_parts_is_whole_and_safetensors_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few tensors, and tensors above a part; and rounding while packing."""
    state = contents(learnt())
    for staged, chunk in ((1, 7), (100, 64), (10**6, 10**6)):
        monkeypatch.setattr(bundle, "STAGED_BYTES", staged)
        monkeypatch.setattr(bundle, "_CHUNK_BYTES", chunk)
        manifest, data = pack(3, 0, state, 2, dtype=torch.bfloat16)
        found = read(manifest, data).tensors
        rounded = {slot: {n: t.bfloat16() for n, t in tensors.items()} for slot, tensors in state.items()}
        assert same(found, rounded)
        assert same({"policy": safetensors.torch.load(bytes(data))}, {"policy": _flat(rounded)})


def _flat(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{slot}/{name}": tensor for slot, tensors in state.items() for name, tensor in tensors.items()}


def test_another_versions_content_is_refused() -> None:
    (asked, _), (other, data) = published(learnt()), published(learnt())
    assert asked.digest != other.digest
    said = refused(asked, data, make())
    assert f"found digest {other.digest}, expected {asked.digest}" in said


@pytest.mark.parametrize(
    ("change", "target", "says"),
    [
        (lambda c: c, lambda: make(targets=("to_q",)), "published for 2 modules, but 1 are bound here"),
        (lambda c: {**c, "ema": c["old"]}, make, "found slots ema, old, policy, expected slots among"),
        (lambda c: {"old": c["old"]}, make, "with policy"),
        (
            lambda c: {**c, "old": dict(list(c["old"].items())[1:])},
            make,
            "slot old: found 3 tensors, expected 4",
        ),
        (lambda c: {**c, "old": {**c["old"], "x": torch.ones(1)}}, make, "1 unknown, first 'x'"),
        (lambda c: c, lambda: make(width=8), "is [7, 2] float32, expected [8, 2] float32"),
        (
            lambda c: {**c, "old": {n: t.bfloat16() for n, t in c["old"].items()}},
            make,
            "is [2, 5] bfloat16, expected [2, 5] float32",
        ),
    ],
    ids=["modules", "slots", "needs", "missing", "unknown", "shape", "type"],
)
def test_a_mismatch_is_an_error_and_nothing_is_written(
    change: Callable[[dict[str, dict[str, Tensor]]], dict[str, dict[str, Tensor]]],
    target: Callable[[], WeightSlots],
    says: str,
) -> None:
    manifest, data = pack(3, 0, change(contents(learnt())), 2)
    said = refused(manifest, data, target(), needs=("policy",))
    assert says in said
    assert "version 3" in said


def test_modules_are_counted_on_both_sides() -> None:
    manifest, data = published(learnt())
    unbound = make()
    unbound.modules_bound = 0
    assert "at least 1" in refused(dataclasses.replace(manifest, modules_bound=0), data, unbound)
    with pytest.raises(WeightsError, match="0 slots are bound to 1 modules; expected at least 1 of each"):
        pack(1, 0, {}, 1)
    with pytest.raises(WeightsError, match="bound to 0 modules; expected at least 1"):
        pack(1, 0, contents(learnt()), 0)


def test_what_cannot_be_packed_is_reported() -> None:
    with pytest.raises(WeightsError, match="slot 'policy' of version 1 has 0 tensors"):
        pack(1, 0, {"policy": {}}, 1)
    with pytest.raises(WeightsError, match=r"is torch\.complex64; expected one of"):
        pack(1, 0, {"policy": {"w": torch.ones(1, dtype=torch.complex64)}}, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_types_and_odd_shapes_survive(dtype: torch.dtype) -> None:
    tensors = {
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones(0, 3, dtype=dtype),
        "turned": torch.arange(6).reshape(2, 3).to(dtype).T,
    }
    manifest, data = pack(1, 0, {"policy": tensors}, 1)
    found = read(manifest, data).tensors["policy"]
    assert all(torch.equal(found[n], t) and found[n].dtype == dtype for n, t in tensors.items())
