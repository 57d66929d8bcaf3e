"""The learner's state on disk: weights of the trained slots, AdamW's moments, counters.

``learner.json`` is the index. Whole weights go to a safetensors file; sharded ones to torch's distributed
checkpoint (a shard per rank); either loads into any number of ranks. The frozen ``reference`` slot is not
saved; of a base that is held in few bits, a digest.

Writing is neither atomic nor synced; the checkpoint store does that for the directory.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from spotlight.models.shared.checks import difference
from spotlight.models.shared.sharded import is_sharded, whole, write_whole
from spotlight.models.slots import WeightSlots
from spotlight.training.sharded_files import TensorReader
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.file_errors import needs_user, storage_error
from spotlight_weights.flat import digest_of

FORMAT = 1
INDEX, WHOLE, SHARDED = "learner.json", "learner.safetensors", "learner.dcp"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIMIZER = "optimizer."
_UNREADABLE = (
    *(OSError, EOFError, KeyError, ValueError, TypeError, RuntimeError),
    *(pickle.UnpicklingError, BadZipFile, SafetensorError, CheckpointException),
)


class StateError(UserError, RuntimeError):
    """A saved state is unusable; names the file, the problem and the remedy."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Optimizer steps applied, batches finished and samples trained: as states and digests have them."""

    steps: int
    batches: int
    samples: int = 0


def save(directory: Path, slots: WeightSlots, optimizer: Optimizer, counters: Counters, ranks: Ranks) -> None:
    """Write the state. Every rank must call this with the same directory on a shared file system.

    Raises:
        StoreError: the disk is full or not writable, for any rank's share; what was written stays.
    """
    tensors = _tensors(slots, optimizer)
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if any(map(is_sharded, tensors.values())):
            dcp_save(tensors, checkpoint_id=directory / SHARDED)
        elif ranks.is_main:
            # safetensors refuses non-contiguous views; contiguous() copies only those.
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WHOLE)
        if ranks.is_main:
            index = {
                "format": FORMAT,
                **asdict(counters),
                "optimizer_steps": _optimizer_steps(slots, optimizer),
                "base": digest_of(slots.packed()),
                "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
            }
            (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    ranks.barrier()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        cause = _cause(error)
        # torch writes files with C++, which raises RuntimeError alone; its subclasses are of other parts.
        written = isinstance(cause, (OSError, SafetensorError)) or type(cause) is RuntimeError
        if written and needs_user(cause, directory):
            raise storage_error("cannot write the learner's state", directory, cause) from error
        raise cause from None


def load(directory: Path, slots: WeightSlots, optimizer: Optimizer) -> Counters:
    """Read a state saved by any number of ranks; every rank must call this.

    Raises:
        StateError: a file is missing or damaged, or of another model, base, LoRA shape or slots; nothing has
            changed. If a sharded state proves damaged during the read, load another one before using the
            learner.
    """
    index = _read_index(directory / INDEX)
    if index.base != (found := digest_of(slots.packed())):
        raise StateError(
            f"{directory / INDEX} was trained beside a quantised base of digest {index.base[:12] or 'none'}, "
            f"and this one has {found[:12] or 'none'}; expected the same: resume with the model files and "
            "the package that the run began with"
        )
    steps = index.optimizer_steps
    parameters = slots.trainable_parameters()
    targets = _weights(slots)
    targets |= {
        f"{_OPTIMIZER}{moment}.{name}": torch.zeros_like(parameters[name], requires_grad=False)
        for name in steps
        if name in parameters
        for moment in _MOMENTS
    }
    _check_shapes(directory / INDEX, index.shapes, targets)
    _read(directory, targets)
    optimizer.state.clear()
    for name, step in steps.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(step, device=parameter.device),
            **{moment: targets[f"{_OPTIMIZER}{moment}.{name}"] for moment in _MOMENTS},
        }
    return index.counters


def load_weights(directory: Path, slots: WeightSlots) -> None:
    """Read the weights only, for inference. Raises :class:`StateError` like :func:`load`."""
    index = _read_index(directory / INDEX)
    targets = _weights(slots)
    saved = {name: shape for name, shape in index.shapes.items() if not name.startswith(_OPTIMIZER)}
    _check_shapes(directory / INDEX, saved, targets)
    _read(directory, targets)


def digest(slots: WeightSlots, optimizer: Optimizer, counters: Counters) -> str:
    """SHA-256 over names, shapes, types and values of everything :func:`save` writes.

    Gathers sharded tensors, so every rank must call this; all get the same result.
    """
    counted = [*astuple(counters), _optimizer_steps(slots, optimizer)]
    total = hashlib.sha256(json.dumps(counted, sort_keys=True).encode())
    for name, tensor in sorted(_tensors(slots, optimizer).items()):
        full = whole(tensor)
        total.update(f"{name} {full.dtype} {list(full.shape)}".encode())
        total.update(full.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _weights(slots: WeightSlots) -> dict[str, Tensor]:
    kept = (slot for slot in slots.slots if slot != "reference")
    return {f"{slot}.{name}": tensor for slot in kept for name, tensor in slots.state(slot).items()}


def _tensors(slots: WeightSlots, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = _weights(slots)
    for name, state in _optimizer_state(slots, optimizer):
        for moment in _MOMENTS:
            tensors[f"{_OPTIMIZER}{moment}.{name}"] = state[moment].detach()
    return tensors


def _optimizer_steps(slots: WeightSlots, optimizer: Optimizer) -> dict[str, int]:
    return {name: int(state["step"]) for name, state in _optimizer_state(slots, optimizer)}


def _optimizer_state(slots: WeightSlots, optimizer: Optimizer) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    for name, parameter in slots.trainable_parameters().items():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


@dataclass(frozen=True, slots=True)
class _StateIndex:
    counters: Counters
    optimizer_steps: dict[str, float]
    shapes: dict[str, list[int]]
    base: str


def _read_index(path: Path) -> _StateIndex:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise StateError(
                f"{path} has format {index['format']!r}; this version reads {FORMAT}. Use the version that "
                "made it (package_version in the checkpoint's manifest.json), or start a run of another name."
            )
        return _StateIndex(
            # Older states lack samples; their runs schedule by iteration.
            Counters(int(index["steps"]), int(index["batches"]), int(index.get("samples", 0))),
            {str(name): float(step) for name, step in index["optimizer_steps"].items()},
            {str(name): [int(n) for n in shape] for name, shape in index["shapes"].items()},
            str(index.get("base", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StateError(_damaged(path, error)) from error


def _check_shapes(path: Path, found: Mapping[str, Sequence[int]], expected: Mapping[str, Tensor]) -> None:
    if odd := difference(found, expected):
        raise StateError(
            f"{path} {odd}: it is of another model, LoRA shape, algorithm or EMA: resume with the run's own "
            "configuration"
        )


def _read(directory: Path, targets: dict[str, Tensor]) -> None:
    if (directory / WHOLE).exists():
        _read_whole(directory / WHOLE, targets)
    else:
        _read_sharded(directory / SHARDED, targets)


def _read_whole(path: Path, targets: Mapping[str, Tensor]) -> None:
    with _reading(path), safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in targets}
    _check_shapes(path, {name: tensor.shape for name, tensor in tensors.items()}, targets)
    for name, target in targets.items():
        write_whole(target, tensors[name])


def _read_sharded(path: Path, targets: dict[str, Tensor]) -> None:
    with _reading(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(targets, storage_reader=TensorReader(path), no_dist=Ranks.current().world == 1)
    increment_version(list(targets.values()))  # it writes shards, which the whole tensors do not count


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise StateError(_damaged(path, error)) from error


def _damaged(path: Path, error: BaseException) -> str:
    cause = _cause(error)
    return (
        f"{path} cannot be read ({type(cause).__name__}: {cause}): the learner's state is missing or "
        "damaged; use an earlier checkpoint"
    )


def _cause(error: BaseException) -> BaseException:
    """What a rank raised: a CheckpointException, which is no Exception, only wraps it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
