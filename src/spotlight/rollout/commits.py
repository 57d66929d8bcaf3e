"""Commits of rollouts: a state as several values, each of which the store gets once.

- Every latent that is kept for training is a value of its own, written when it is new.
- The embeddings of a prompt stay where they came from: in the store, under the prompt.
- The rest, which changes with every step, refers to those by their checksums.

Invariants:
- A state comes after the latents that it refers to: where it is stored, so are they.
- What is restored has the checksums that it was committed with; else it is refused.
- The thread of the rollouts only begins copies from the GPU. Who packs waits for them and launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from spotlight.models.condition import Condition
from spotlight.rollout.serialization import SerializationError, checksum_of, pack_tensors, unpack_tensors
from spotlight.rollout.state import CONDITION, Recipe, RolloutState, from_tensors
from spotlight.scheduler.types import RolloutId

_STATE, _LATENT = "commit", "latent"


@dataclass(frozen=True, slots=True)
class Packed:
    """A value of a rollout.

    Attributes:
        latent: names one of its latents; empty: this is the state.
    """

    rollout: RolloutId
    step: int
    data: bytes
    latent: str = ""


@dataclass(eq=False, slots=True)
class _Copy:
    """A tensor on the host, once it is copied; of a latent that is packed only its name."""

    host: Tensor | None = None
    latent: str = ""

    def take(self) -> Tensor:
        assert self.host is not None, "asked for before it is copied, or after it was given away"
        return self.host


@dataclass(frozen=True, slots=True)
class _Commit:
    state: RolloutState
    latents: list[_Copy]
    rest: dict[str, _Copy]


class Committer:
    """Packs the states of one worker, in order; what it has packed, it takes to be stored."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()  # those of states that are held somewhere

    def begin(self, states: Sequence[RolloutState]) -> Iterator[Packed]:
        """Begin to copy what is new; it is packed as it is taken, by any thread."""
        new: list[tuple[Tensor, _Copy]] = []

        def copy(tensor: Tensor) -> _Copy:
            new.append((tensor, made := _Copy()))
            return made

        def once(tensor: Tensor) -> _Copy:
            # One lookup: each takes microseconds, and there are hundreds.
            found: _Copy | None = self._copies.get(tensor)  # type: ignore[no-untyped-call]
            if found is None:
                found = self._copies[tensor] = copy(tensor)
            return found

        commits = [
            _Commit(
                state,
                [once(tensor) for tensor in state.kept],
                {name: copy(tensor) for name, tensor in _rest(state).items()},
            )
            for state in states
        ]
        return _packed(commits, _begin_copies(new))


def _rest(state: RolloutState) -> dict[str, Tensor]:
    log_probs = torch.stack(list(state.log_probs)) if state.log_probs else torch.empty(0)
    rest = {"sigmas": state.sigmas, "log_probs": log_probs}
    if not state.kept or state.latents is not state.kept[-1]:
        rest["latents"] = state.latents
    if state.condition.checksum is None:
        rest |= {CONDITION + name: tensor for name, tensor in state.condition.tensors.items()}
    return rest


def _packed(commits: Sequence[_Commit], wait: Callable[[], None]) -> Iterator[Packed]:
    wait()
    for commit in commits:
        state, name = commit.state, commit.state.rollout.id
        for index, copy in enumerate(commit.latents):
            if copy.host is not None:
                data = pack_tensors(_LATENT, name, {"latents": copy.host})
                copy.host, copy.latent = None, f"{index}.{checksum_of(data)}"
                yield Packed(name, state.step, data, copy.latent)
        tensors = {key: copy.take() for key, copy in commit.rest.items()}
        header = state.header() | {"kept": [copy.latent for copy in commit.latents]}
        yield Packed(name, state.step, pack_tensors(_STATE, name, tensors, header))


def _begin_copies(new: list[tuple[Tensor, _Copy]]) -> Callable[[], None]:
    """One copy of all that is on a GPU. What is returned waits for it."""
    for tensor, copy in new:
        copy.host = tensor.detach()  # nothing changes a state's tensors
    far = [(tensor, copy) for tensor, copy in new if tensor.device.type == "cuda"]
    if not far:
        return lambda: None
    far.sort(key=lambda pair: -pair[0].element_size())  # so that each begins at a multiple of its type's size
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor, _ in far])
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    device, copied = flat.device, torch.cuda.current_stream(flat.device).record_event()
    pieces = torch.split(host, [tensor.nbytes for tensor, _ in far])
    for piece, (tensor, copy) in zip(pieces, far, strict=True):
        copy.host = piece.view(tensor.dtype).view(tensor.shape)

    def wait() -> None:
        # In another thread, whose current GPU is the first one: that would give this process a context there.
        with torch.cuda.device(device):
            copied.synchronize()

    return wait


def latents_of(data: bytes) -> list[str]:
    """Names of the latents that a packed state refers to. Raises SerializationError."""
    header, _ = unpack_tensors(_STATE, data)
    names = header.get("kept")
    if not isinstance(names, list):
        raise SerializationError(f"a packed state's latents are {names!r}; expected a list of their names")
    return [str(name) for name in names]


def restore(
    data: bytes,
    latents: Sequence[bytes],
    condition: Condition | None,
    recipe: Recipe,
    device: torch.device | str = "cpu",
) -> RolloutState:
    """The state that was packed, on ``device``.

    Args:
        latents: those of :func:`latents_of`, in order.
        condition: of the rollout's prompt, from the store.

    Raises:
        SerializationError: something is damaged, or not what it was when the state was committed.
        ValueError: the rollout began with another recipe.
    """
    try:
        header, tensors = _joined(data, latents, condition)
        return from_tensors(header, tensors, recipe, device)
    except (LookupError, TypeError, ValidationError) as error:
        raise SerializationError(
            f"a committed state lacks a part, or has another in its place ({type(error).__name__}: {error}): "
            "make it new"
        ) from error


def _joined(
    data: bytes, latents: Sequence[bytes], condition: Condition | None
) -> tuple[Mapping[str, object], dict[str, Tensor]]:
    """Header and tensors of the state."""
    names = latents_of(data)
    header, tensors = unpack_tensors(_STATE, data)
    found = [f"{index}.{checksum_of(latent)}" for index, latent in enumerate(latents)]
    if found != names:
        raise SerializationError(
            f"found latents {found}, but a state was committed with {names}: make it new"
        )
    kept = [unpack_tensors(_LATENT, latent)[1]["latents"] for latent in latents]
    if len(shapes := {latent.shape for latent in kept}) > 1:
        raise SerializationError(f"found latents of shapes {sorted(shapes)}, expected one shape: make it new")
    if kept:
        tensors = {"latents": kept[-1], **tensors}
    tensors["kept"] = torch.stack(kept) if kept else torch.empty(0)
    expected = header["embeddings"]
    if expected is not None:
        if condition is None or condition.checksum != expected:
            raise SerializationError(
                f"found embeddings {condition and condition.checksum}, but a state was committed with "
                f"{expected}: make it new"
            )
        tensors |= {CONDITION + name: tensor for name, tensor in condition.tensors.items()}
    return header, tensors
