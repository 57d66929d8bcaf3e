"""Load a component with its weights, or without them, to be filled by a peer or, once sharded, from files.

Invariant: a skeleton's weights are NaN and its forwards raise until :func:`filling` exits without an error,
so a partly filled module cannot be used by mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spotlight.models.experts import denoisers
from spotlight.models.peft_layers import without_adapters
from spotlight.models.shared.quantised import as_stored
from spotlight.models.shared.sharded import is_sharded
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_export import keeps_float32
from spotlight_files.pipeline_files import PipelineFiles, shards_of

if TYPE_CHECKING:
    from diffusers.models import ModelMixin
    from torch.distributed.tensor import DTensor

    from spotlight_kernels.quantised.linear import StoredWeight

_shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}


def skeleton(
    kind: type[ModelMixin],
    config: Mapping[str, object],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deferred: bool = False,
) -> ModelMixin:
    """A model whose parameters and persistent buffers are NaN and whose forward raises.

    As after ``from_pretrained``, some parts stay float32 and computed buffers (rotary tables) are present.

    Args:
        deferred: parameters stay on the meta device, without memory, until :func:`allocate`.

    Raises:
        ModelError: the configuration does not fit the class.
    """
    # Imported here: the head of a cluster, which holds no model, imports this module.
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does
    try:
        with init_empty_weights():
            model = kind.from_config(dict(config))
    except Exception as error:
        raise ModelError(f"cannot make a {kind.__name__} from its config.json: {error}") from error
    finally:
        torch.set_default_dtype(before)
    for path, module in model.named_modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        for name, parameter in list(module.named_parameters(recurse=False)):
            stored = _stored(kind, f"{path}.{name}", parameter, dtype)
            value = stored if deferred else _nothing(stored, device)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            stored = _stored(kind, f"{path}.{name}", buffer, dtype)
            setattr(module, name, _nothing(stored, device) if name in saved else buffer.to(device))
    model.register_forward_pre_hook(_refuse)
    return model.eval()


def shapes_of(config: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the parameters of a diffusers model by its ``config.json``, on the meta device: no memory.

    Found once a process: it takes up to a second.
    """
    import diffusers

    key = json.dumps(config, sort_keys=True, default=repr)
    if key not in _shapes:
        with torch.device("meta"):
            model = getattr(diffusers, str(config["_class_name"])).from_config(dict(config))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        _shapes[key] = MappingProxyType(shapes)
    return _shapes[key]


def load_weights(
    kind: type[ModelMixin], files: PipelineFiles, component: str, dtype: torch.dtype, device: torch.device
) -> ModelMixin:
    """A component with the weights of its folder, frozen, for inference.

    Raises:
        ModelError: unreadable weights, or missing or unexpected tensors.
    """
    folder = files.folder(component)
    # Load onto the GPU file by file: otherwise each rank would first hold a whole DiT in host memory.
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, report = kind.from_pretrained(
            files.root,
            subfolder=component,
            torch_dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **placed,
        )
    except Exception as error:
        raise ModelError(f"cannot load {kind.__name__} from {folder}: {error}") from error
    for what in ("missing", "unexpected"):
        keys = sorted(report[f"{what}_keys"])
        if keys:
            raise ModelError(
                f"{folder}: {len(keys)} {what} tensors, first {keys[0]!r}: config.json and weights do not "
                "belong together; copy or download the folder again"
            )
    return model.to(device).eval().requires_grad_(False)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory, filled with NaN; of sharded ones, this rank's share."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta:
                held = _allocated(parameter, device)
                setattr(part, name, nn.Parameter(held, requires_grad=parameter.requires_grad))
    # FSDP2 notices replaced parameters after a state dict is loaded.
    module.load_state_dict({}, strict=False)


def _allocated(parameter: Tensor, device: torch.device) -> Tensor:
    if not is_sharded(parameter):
        return _nothing(parameter, device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        _nothing(parameter.to_local(), device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_files(module: nn.Module, source: Path, key: str) -> None:
    """Read the headers that :func:`fill_from_files` will read the tensors of; it raises the same errors."""
    _visit_files(module, as_stored(module, base_state(module)), source, key, lambda *_: None)


def fill_from_files(module: nn.Module, source: Path, key: str) -> None:
    """Fill a skeleton from a directory or a file of safetensors, tensor by tensor.

    Of a sharded module, a rank reads the rows of its shard, so that no process ever holds a whole model; a
    layer held in few bits quantises its weight as it comes.

    Args:
        key: configuration key that names ``source``, for errors.

    Raises:
        ModelError: no safetensors there, or other names or shapes than the module's.
    """
    with filling(module) as targets:
        _visit_files(module, as_stored(module, targets), source, key, _read_tensor)


def fill_from_module(module: nn.Module, filled: nn.Module) -> None:
    """Fill a skeleton with the weights of another module, which is alike and sharded alike."""
    with filling(module) as targets:
        for name, source in base_state(filled).items():
            _local(targets[name]).copy_(_local(source))


def _visit_files(
    module: nn.Module,
    targets: Mapping[str, Tensor | StoredWeight],
    source: Path,
    key: str,
    visit: Callable[[Any, str, Tensor | StoredWeight], None],
) -> None:
    found: set[str] = set()
    for shard in shards_of(source, key):
        try:
            with safe_open(shard, framework="pt") as file:
                names = set(file.keys())
                for name in sorted(names & targets.keys()):
                    _check_shape(targets[name], file.get_slice(name), f"{key}: {name!r} of {shard}")
                    visit(file, name, targets[name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{key}: {shard} cannot be read ({error}): copy or download it again") from error
        found |= names
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    unknown = {n for n in found - targets.keys() if not any(re.search(pattern, n) for pattern in ignored)}
    for kind, odd in (("lacks", targets.keys() - found), ("has unknown", unknown)):
        if odd:
            raise ModelError(
                f"{key}: {source} {kind} {len(odd)} tensors, first {min(odd)!r}; expected the "
                f"{len(targets)} of {type(module).__name__}: convert other layouts with its "
                "from_single_file and save_pretrained"
            )


def _check_shape(target: Tensor | StoredWeight, stored: Any, what: str) -> None:
    shape = list(stored.get_shape())
    if shape != list(target.shape):
        raise ModelError(f"{what} has shape {shape}; expected {list(target.shape)}: it is of another model")


def _read_tensor(file: Any, name: str, target: Tensor | StoredWeight) -> None:
    if not isinstance(target, Tensor) or not is_sharded(target):
        target.copy_(file.get_tensor(name))
        return
    rows = _rows(target)
    if rows.start < rows.stop:
        target.to_local().copy_(file.get_slice(name)[rows])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _rows(tensor: DTensor) -> slice:
    """This rank's rows of a tensor that FSDP2 sharded: as even as ``torch.chunk`` makes them."""
    mesh = tensor.device_mesh
    (dimension,) = (i for i, placement in enumerate(tensor.placements) if placement.is_shard(dim=0))
    rows = tensor.shape[0]
    most = -(-rows // mesh.size(dimension))
    start = min(mesh.get_local_rank(dimension) * most, rows)
    return slice(start, min(start + most, rows))


@contextmanager
def filling(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a skeleton's tensors to be written in place; afterwards it may run.

    The names are those of :func:`base_state`.

    Raises:
        ModelError: on exit, if a tensor was not written to its end.
    """
    targets = base_state(module)
    yield targets
    # Tensors are written front to back, so the last value shows whether one is complete.
    here = {name: _local(target) for name, target in targets.items()}
    floats = {n: t.reshape(-1)[-1].float() for n, t in here.items() if t.is_floating_point() and t.numel()}
    empty = torch.stack([*floats.values(), torch.zeros((), device=next(iter(here.values())).device)])
    lacking = [name for name, nan in zip(floats, empty.isnan().tolist(), strict=False) if nan]
    if lacking:
        raise ModelError(
            f"{len(lacking)} of {len(targets)} tensors of {type(module).__name__} were not filled, first "
            f"{lacking[0]!r}: fill all of them, or read the transformer from disk"
        )
    for part in denoisers(module).values():
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is _refuse:
                del part._forward_pre_hooks[key]


def base_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the base model without adapters, under their names on disk.

    Detached views. Call it outside of :func:`spotlight.models.peft_layers.merged`, which swaps the
    parameters' memory temporarily; the views stay valid as long as the base does.
    """
    return without_adapters(module.state_dict().items())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What a module's files hold besides parameters, e.g. tables of positions, under its name on disk."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def _stored(kind: type[nn.Module], name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32 if keeps_float32(kind, name) else dtype)


def modules_of(names: Iterable[str]) -> int:
    """Number of modules that these tensor names belong to."""
    return len({name.rpartition(".")[0] for name in names})


def _nothing(tensor: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def _refuse(module: nn.Module, _: object) -> NoReturn:
    raise ModelError(
        f"{type(module).__name__} has no weights yet: it was loaded without them and never filled; fetch "
        "them from a peer inside `filling`, or read the transformer from disk"
    )
