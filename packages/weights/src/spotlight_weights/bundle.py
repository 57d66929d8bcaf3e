"""A published policy version as bytes, and loading it into weight slots.

The bytes are a safetensors file with tensors named ``slot/name``, in one order. The digest is of the bytes;
they hold neither version nor lineage, so equal content has an equal digest.

Invariant: a :class:`Bundle` has the digest of its manifest, and :func:`bind` writes nothing until slots,
names, shapes, types, and the number of bound modules on both sides are checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from spotlight_weights.weight_errors import WeightsError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that a bundle may hold, by their safetensors names."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CHUNK_BYTES, _THREADS = 4 * 2**20, 8
_DIGEST = b"spotlight weights 2\0"
"""Begins what the digest is made of: another way to compute it takes another number."""
_FETCH_AGAIN = "fetch it again; if that fails too, the publisher's copy is damaged: publish the version again"


Kind: TypeAlias = tuple[torch.dtype, Sequence[int]]
"""Type and shape of a tensor."""

STAGED_BYTES = 256 * 2**20
ON_DEVICE_BYTES = 2 * 2**30
"""Most bytes put on a GPU beside the weights that they replace: adapters are smaller, whole models not."""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Describes a published version.

    Attributes:
        version: optimizer steps applied.
        lineage: how often the learner had been restored.
        digest: hexadecimal, of the bytes: see :func:`content_digest`.
        modules_bound: modules whose weights the tensors replace; > 0 and equal on both sides.
        bytes: length of the bundle.
        base: digest of what it was trained beside, where that is held in few bits; else empty.
    """

    version: int
    lineage: int
    digest: str
    modules_bound: int
    slots: tuple[str, ...]
    bytes: int
    base: str = ""

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            WeightsError: not a manifest, or of another package version.
        """
        try:
            fields = json.loads(text)
            manifest = cls(**{**fields, "slots": tuple(fields["slots"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WeightsError(
                f"manifest of weights: found {text[:120]!r}, expected a JSON object with "
                f"{', '.join(f.name for f in dataclasses.fields(cls))} ({error}): run the same version of "
                "the package on every node"
            ) from error
        return manifest

    def __str__(self) -> str:
        return f"version {self.version} (lineage {self.lineage}, digest {self.digest[:12]})"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle checked against its manifest.

    Attributes:
        flat: all tensors, [bytes] uint8.
        names: of the tensors in ``flat``, one after another.
    """

    manifest: WeightsManifest
    flat: Tensor = field(repr=False)
    names: Sequence[tuple[str, str]] = field(repr=False)
    kinds: Sequence[Kind] = field(repr=False)

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """slot -> name -> view of ``flat``. Read-only."""
        return self.on(torch.device("cpu"))

    def on(self, device: torch.device) -> dict[str, dict[str, Tensor]]:
        """As ``tensors``, but moved to ``device`` in one transfer, unless they are too many."""
        small = self.flat.numel() <= ON_DEVICE_BYTES
        flat = on_device(self.flat, device) if small and device.type != "cpu" else self.flat
        tensors: dict[str, dict[str, Tensor]] = {slot: {} for slot in self.manifest.slots}
        for (slot, name), tensor in zip(self.names, carve(flat, self.kinds), strict=True):
            tensors[slot][name] = tensor
        return tensors


class Bindable(Protocol):
    """The part of ``spotlight.models.slots.WeightSlots`` that binding needs.

    Slot names are ``Any``, since its methods take a literal type.
    """

    modules_bound: int

    @property
    def slots(self) -> tuple[str, ...]:
        """The existing slots."""

    def state(self, slot: Any) -> Mapping[str, Tensor]:
        """A slot's tensors by name."""

    def load_state(self, slot: Any, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into a slot."""


def pack(
    version: int,
    lineage: int,
    slots: Mapping[str, Mapping[str, Tensor]],
    modules_bound: int,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[WeightsManifest, bytearray]:
    """Serialize the weights of some slots.

    Args:
        slots: slot -> name -> whole (unsharded) tensor, all on one device.
        modules_bound: ``WeightSlots.modules_bound`` of their source.
        dtype: to round to; default: theirs.

    Raises:
        WeightsError: no modules, no tensors, or an unsupported dtype.
    """
    if modules_bound < 1 or not slots:
        raise WeightsError(
            f"weights of version {version}: {len(slots)} slots are bound to {modules_bound} modules; "
            "expected at least 1 of each: no target of the adapter matches the model (learner.lora.targets)"
        )
    flat: dict[str, tuple[Tensor, Kind]] = {}
    for slot, tensors in slots.items():
        if not tensors or "/" in slot:
            raise WeightsError(
                f"weight slot {slot!r} of version {version} has {len(tensors)} tensors; expected at least 1, "
                "and a slot's name without '/'"
            )
        for name, tensor in tensors.items():
            kind = dtype or tensor.dtype, tuple(tensor.shape)
            if kind[0] not in _NAMES:
                raise WeightsError(
                    f"{slot}/{name} of version {version} is {kind[0]}; expected one of "
                    f"{', '.join(map(str, _NAMES))}"
                )
            flat[f"{slot}/{name}"] = tensor.detach(), kind
    # As safetensors orders them: every tensor then begins at a multiple of its type's size.
    names = sorted(flat, key=lambda name: (-flat[name][1][0].itemsize, name))
    kinds = [flat[name][1] for name in names]
    head = _header(names, kinds)
    data = bytearray(len(head) + sum(map(nbytes, kinds)))
    data[: len(head)] = head
    values = [flat[name][0] for name in names]
    gather(values, kinds, torch.frombuffer(data, dtype=torch.uint8)[len(head) :])
    return WeightsManifest(
        version, lineage, content_digest(data), modules_bound, tuple(slots), len(data)
    ), data


def _header(names: Sequence[str], kinds: Sequence[Kind]) -> bytes:
    ends = list(accumulate(map(nbytes, kinds), initial=0))
    fields = {
        name: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        for name, (dtype, shape), (start, end) in zip(names, kinds, pairwise(ends), strict=True)
    }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def content_digest(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 over the SHA-256 of every chunk, which are computed on several threads."""
    view = memoryview(data)
    chunks = [view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES)]
    with ThreadPoolExecutor(_THREADS, "digest") as threads:
        leaves = threads.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)
        return hashlib.sha256(_DIGEST + b"".join(leaves)).hexdigest()


def read(manifest: WeightsManifest, data: bytes | bytearray) -> Bundle:
    """Check that ``data`` matches ``manifest`` exactly. It must not change from then on.

    Raises:
        WeightsError: truncated, damaged, or different content.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nothing here writes
        flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return _checked(manifest, flat)


def open_bundle(manifest: WeightsManifest, path: Path, *, hashed: bool = False) -> Bundle:
    """Like :func:`read`, for a file. Tensors are mapped privately: a stray write changes this process's copy
    only.

    Args:
        hashed: the file's content is known to match: it is not hashed again.

    Raises:
        FileNotFoundError: there is no such file.
        WeightsError: see :func:`read`.
    """
    size = path.stat().st_size
    try:
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError:
        path.stat()  # raises where it was removed meanwhile
        raise
    return _checked(manifest, flat, hashed=hashed)


def _checked(manifest: WeightsManifest, data: Tensor, *, hashed: bool = False) -> Bundle:
    if data.numel() != manifest.bytes:
        raise WeightsError(
            f"weights of {manifest}: found {data.numel()} bytes, expected {manifest.bytes}: they were cut; "
            + _FETCH_AGAIN
        )
    found = manifest.digest if hashed else content_digest(data.numpy().data)
    if found != manifest.digest:
        raise WeightsError(
            f"weights of {manifest}: found digest {found}, expected {manifest.digest}; {_FETCH_AGAIN}"
        )
    try:
        names, kinds, flat = _parsed(data)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise WeightsError(f"weights of {manifest} are no bundle: {error!r}; {_FETCH_AGAIN}") from error
    slots = {slot for slot, _ in names}
    if slots != set(manifest.slots):
        raise WeightsError(
            f"weights of {manifest}: found slots {_listed(slots)}, expected {_listed(manifest.slots)}: the "
            "manifest is of another bundle; publish the version again"
        )
    return Bundle(manifest, flat, names, kinds)


def _parsed(data: Tensor) -> tuple[list[tuple[str, str]], list[Kind], Tensor]:
    """Names and kinds of a bundle's tensors, and their bytes. Raises if it is none of :func:`pack`."""
    raw = data[: 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")].numpy().tobytes()
    fields = json.loads(raw[8:])
    kinds: list[Kind] = [(_DTYPES[field["dtype"]], tuple(field["shape"])) for field in fields.values()]
    if raw != _header(list(fields), kinds) or len(raw) + sum(map(nbytes, kinds)) != data.numel():
        raise ValueError("its header does not describe its bytes")
    names = [(slot, rest) for slot, _, rest in (name.partition("/") for name in fields)]
    carve(flat := data[len(raw) :], kinds)  # raises where a shape is negative, or a tensor begins askew
    return names, kinds, flat


def bind(
    bundle: Bundle, target: Bindable, *, needs: Collection[str] = (), dtype: torch.dtype | None = None
) -> None:
    """Copy a version into a worker's weight slots: all or nothing.

    Args:
        needs: slots that the bundle must contain.
        dtype: that it was rounded to for publishing; default: that of the slots.

    Raises:
        WeightsError: anything differs; nothing has been written.
    """
    manifest, tensors = bundle.manifest, bundle.tensors
    if not 0 < manifest.modules_bound == target.modules_bound:
        raise WeightsError(
            f"weights of {manifest}: published for {manifest.modules_bound} modules, but "
            f"{target.modules_bound} are bound here; expected the same number, at least 1: give learner and "
            "workers the same model, learner.mode and learner.lora.targets"
        )
    absent = [slot for slot in tensors if slot not in target.slots]
    lacking = [slot for slot in needs if slot not in tensors]
    if absent or lacking:
        raise WeightsError(
            f"weights of {manifest}: found slots {_listed(tensors)}, expected slots among "
            f"{_listed(target.slots)}"
            + (f" with {_listed(needs)}" if needs else "")
            + ": give learner and workers the same configuration"
        )
    states = {slot: target.state(slot) for slot in tensors}
    for slot, state in states.items():
        check_same(f"weights of {manifest}, slot {slot}", tensors[slot], state, dtype)
    (device,) = {tensor.device for state in states.values() for tensor in state.values()}
    for slot, moved in bundle.on(device).items():
        target.load_state(slot, moved)


def check_same(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Compare names, shapes and types.

    Args:
        dtype: of ``found``; default: the types of ``expected``.

    Raises:
        WeightsError: names the first tensor that differs.
    """
    remedy = "give both sides the same model, learner.mode, learner.lora, model.dtype and fleet.publish"
    for kind, names in (
        ("missing", [name for name in expected if name not in found]),
        ("unknown", [name for name in found if name not in expected]),
    ):
        if names:
            raise WeightsError(
                f"{what}: found {len(found)} tensors, expected {len(expected)}; {len(names)} {kind}, first "
                f"{names[0]!r}; {remedy}"
            )
    for name, tensor in expected.items():
        ours, theirs = _kind(tensor, dtype), _kind(found[name])
        if ours != theirs:
            raise WeightsError(f"{what}: {name!r} is {theirs}, expected {ours}; {remedy}")


def _kind(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    return f"{list(tensor.shape)} {str(dtype or tensor.dtype).removeprefix('torch.')}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# -- many tensors as one host buffer, and that on a GPU: few large transfers through pinned memory ---------
# torch keeps the pinned memory for the next version.


def gather(tensors: Sequence[Tensor], kinds: Sequence[Kind], flat: Tensor) -> None:
    """Copy tensors of one device one after another into [bytes] uint8 on the CPU, rounded to ``kinds``."""
    at = 0
    for part in _parts([nbytes(kind) for kind in kinds]):
        size = sum(map(nbytes, kinds[part]))
        host = flat[at : at + size]
        at += size
        if tensors[0].device.type == "cpu":
            torch._foreach_copy_(carve(host, kinds[part]), list(tensors[part]))
            continue
        staged = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        torch._foreach_copy_(carve(staged, kinds[part]), list(tensors[part]))
        host.copy_(_pinned(size).copy_(staged))


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """A copy of [bytes] uint8 from the CPU."""
    copy = torch.empty(flat.numel(), dtype=torch.uint8, device=device)
    for start in range(0, flat.numel(), STAGED_BYTES):
        source = flat[start : start + STAGED_BYTES]
        copy[start : start + source.numel()].copy_(_pinned(source.numel()).copy_(source))
    return copy


def carve(flat: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """Views of [bytes] uint8, one after another; a type must not follow a smaller one."""
    sizes = [nbytes(kind) for kind in kinds]
    parts = torch.split(flat, sizes)
    return [
        part.view(dtype).view(torch.Size(shape)) for part, (dtype, shape) in zip(parts, kinds, strict=True)
    ]


def nbytes(kind: Kind) -> int:
    """Bytes of a tensor."""
    dtype, shape = kind
    return dtype.itemsize * torch.Size(shape).numel()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of at most ``STAGED_BYTES``, or of one."""
    first = held = 0
    for index, size in enumerate(sizes):
        if index > first and held + size > STAGED_BYTES:
            yield slice(first, index)
            first, held = index, 0
        held += size
    yield slice(first, len(sizes))
