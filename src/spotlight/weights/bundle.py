"""A published policy version as bytes, and loading it into weight slots.

The bytes are a safetensors file with tensors named ``slot/name``. The digest covers names, types, shapes and
values, but neither version nor lineage, so equal content has an equal digest.

Invariant: :func:`bind` writes nothing until digest, slots, names, shapes, types, and the number of bound
modules on both sides are checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from spotlight.weights.weight_errors import WeightsError

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
_HASHED_AT_ONCE = 64 * 2**20
_FETCH_AGAIN = "fetch it again; if that fails too, the publisher's copy is damaged: publish the version again"


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Describes a published version.

    Attributes:
        version: optimizer steps applied.
        lineage: how often the learner had been restored.
        digest: hexadecimal SHA-256 of the content.
        modules_bound: modules whose weights the tensors replace; > 0 and equal on both sides.
        bytes: length of the bundle.
    """

    version: int
    lineage: int
    digest: str
    modules_bound: int
    slots: tuple[str, ...]
    bytes: int

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
        except (ValueError, TypeError, KeyError) as error:
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
        tensors: slot -> name -> tensor. Read-only.
    """

    manifest: WeightsManifest
    tensors: Mapping[str, Mapping[str, Tensor]] = field(repr=False)


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
    version: int, lineage: int, slots: Mapping[str, Mapping[str, Tensor]], modules_bound: int
) -> tuple[WeightsManifest, bytes]:
    """Serialize the weights of some slots.

    Args:
        slots: slot -> name -> whole (unsharded) tensor, on any device.
        modules_bound: ``WeightSlots.modules_bound`` of their source.

    Raises:
        WeightsError: no modules, no tensors, or an unsupported dtype.
    """
    if modules_bound < 1:
        raise WeightsError(
            f"weights of version {version} are bound to {modules_bound} modules; expected at least 1: no "
            "target of the adapter matches the model (learner.lora.targets)"
        )
    flat: dict[str, Tensor] = {}
    seen: set[int] = set()
    for slot, tensors in slots.items():
        if not tensors or "/" in slot:
            raise WeightsError(
                f"weight slot {slot!r} of version {version} has {len(tensors)} tensors; expected at least 1, "
                "and a slot's name without '/'"
            )
        for name, tensor in tensors.items():
            if tensor.dtype not in _NAMES:
                raise WeightsError(
                    f"{slot}/{name} of version {version} is {tensor.dtype}; expected one of "
                    f"{', '.join(map(str, _NAMES))}"
                )
            # Copied only if on a GPU, not contiguous, or sharing memory with another tensor,
            # which safetensors refuses to write.
            value = tensor.detach().to("cpu").contiguous()
            memory = value.untyped_storage().data_ptr()
            flat[f"{slot}/{name}"] = value.clone() if memory in seen else value
            seen.add(memory)
    data = save(flat)
    digest = content_digest(flat)
    return WeightsManifest(version, lineage, digest, modules_bound, tuple(slots), len(data)), data


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, in the order of the names.

    Args:
        tensors: contiguous, on the CPU.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{_NAMES[tensor.dtype]}\0{shape}\0".encode())
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _HASHED_AT_ONCE):
            digest.update(flat[start : start + _HASHED_AT_ONCE].numpy().data)
    return digest.hexdigest()


def read(manifest: WeightsManifest, data: bytes) -> Bundle:
    """Check that ``data`` matches ``manifest`` exactly.

    Raises:
        WeightsError: truncated, damaged, or different content.
    """
    return _checked(manifest, len(data), lambda: load(data))


def open_bundle(manifest: WeightsManifest, path: Path, *, hashed: bool = False) -> Bundle:
    """Like :func:`read`, for a file. Tensors are mapped privately: a stray write changes this process's copy
    only.

    Args:
        hashed: the file's content is known to match: it is not hashed again.

    Raises:
        FileNotFoundError: there is no such file.
        WeightsError: see :func:`read`.
    """

    def mapped() -> dict[str, Tensor]:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    return _checked(manifest, path.stat().st_size, mapped, hashed=hashed)


def _checked(
    manifest: WeightsManifest, size: int, content: Callable[[], dict[str, Tensor]], *, hashed: bool = False
) -> Bundle:
    if size != manifest.bytes:
        raise WeightsError(
            f"weights of {manifest}: found {size} bytes, expected {manifest.bytes}: they were cut; "
            + _FETCH_AGAIN
        )
    try:
        flat = content()
        found = manifest.digest if hashed else content_digest(flat)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that no bundle holds
        raise WeightsError(f"weights of {manifest} are no safetensors: {error}; {_FETCH_AGAIN}") from error
    if found != manifest.digest:
        raise WeightsError(
            f"weights of {manifest}: found digest {found}, expected {manifest.digest}; {_FETCH_AGAIN}"
        )
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        slot, _, name = key.partition("/")
        tensors.setdefault(slot, {})[name] = tensor
    if set(tensors) != set(manifest.slots):
        raise WeightsError(
            f"weights of {manifest}: found slots {_listed(tensors)}, expected {_listed(manifest.slots)}: the "
            "manifest is of another bundle; publish the version again"
        )
    return Bundle(manifest, tensors)


def bind(
    manifest: WeightsManifest,
    data: bytes | Bundle,
    target: Bindable,
    *,
    needs: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Copy a version into a worker's weight slots: all or nothing.

    Args:
        data: bytes, or a :class:`Bundle`, which is not hashed again.
        needs: slots that the bundle must contain.
        dtype: that it was rounded to for publishing; default: that of the slots.

    Raises:
        WeightsError: anything differs; nothing has been written.
    """
    bundle = data if isinstance(data, Bundle) else read(manifest, data)
    if bundle.manifest.digest != manifest.digest:
        raise WeightsError(
            f"weights of {manifest}: found a bundle with digest {bundle.manifest.digest}, expected "
            f"{manifest.digest}; {_FETCH_AGAIN}"
        )
    if not 0 < manifest.modules_bound == target.modules_bound:
        raise WeightsError(
            f"weights of {manifest}: published for {manifest.modules_bound} modules, but "
            f"{target.modules_bound} are bound here; expected the same number, at least 1: give learner and "
            "workers the same model, learner.mode and learner.lora.targets"
        )
    absent = [slot for slot in bundle.tensors if slot not in target.slots]
    lacking = [slot for slot in needs if slot not in bundle.tensors]
    if absent or lacking:
        raise WeightsError(
            f"weights of {manifest}: found slots {_listed(bundle.tensors)}, expected slots among "
            f"{_listed(target.slots)}"
            + (f" with {_listed(needs)}" if needs else "")
            + ": give learner and workers the same configuration"
        )
    for slot, tensors in bundle.tensors.items():
        check_same(f"weights of {manifest}, slot {slot}", tensors, target.state(slot), dtype)
    for slot, tensors in bundle.tensors.items():
        target.load_state(slot, tensors)


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
