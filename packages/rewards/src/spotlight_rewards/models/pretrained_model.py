"""Load a model that a reward scores with: complete, in float32, and with a name for its weights.

Imported in the reward's own process only: it imports torch.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.files import at_home
from spotlight_rewards.models.hub import unreachable
from spotlight_rewards.reward import RewardSetupError

_DIGEST_CHARS = 12


def load_pretrained(
    model_class: Any,
    source: str,
    *,
    key: str,
    remedy: str,
    unread: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, str]:
    """Load a transformers model for inference.

    Args:
        source: a hub id or a directory.
        key: the reward and its parameter, for messages.
        remedy: where the weights are to be had.
        unread: pattern of the weights that inference does not read and a checkpoint may lack.

    Returns:
        The model, and ``SOURCE@DIGEST`` with a digest of its weights. The source is the checkpoint that the
        weights were converted from, if they were.

    Raises:
        RewardSetupError: the weights cannot be read, do not fit, or are not complete.
    """
    if (source.startswith((".", "/", "~")) or source.count(os.sep) > 1) and _folder(source) is None:
        raise RewardSetupError(f"{key} is {source!r}, which is no directory. {remedy}")
    place, options = where_from(source)
    try:
        model, loading = model_class.from_pretrained(place, output_loading_info=True, dtype=dtype, **options)
    except Exception as error:
        raise RewardSetupError(
            f"{key} is {source!r}, from which transformers reads no {model_class.__name__}: "
            f"{why_not(error, options)}. {remedy}"
        ) from error
    missing = sorted(name for name in loading["missing_keys"] if not re.search(unread, name))
    if missing:  # transformers would score with random numbers in their place
        raise RewardSetupError(
            f"{key} is {source!r}, which lacks {len(missing)} of the weights of {model_class.__name__}, "
            f"first {missing[0]!r}. {remedy}"
        )
    digest = weights_digest(model, unread)
    origin = getattr(model.config, "converted_from", source)
    return model.eval().requires_grad_(False).to(device), f"{origin}@{digest}"


def where_from(source: str) -> tuple[str, dict[str, bool]]:
    """What ``from_pretrained`` takes for a directory or hub id, and how: without a hub, from here."""
    local = _folder(source)
    # Code from the hub is not run; unless told so, transformers asks at the terminal.
    options = {"trust_remote_code": False}
    if local is not None:
        return str(local), options
    return source, options | {"local_files_only": bool(unreachable())}


def _folder(source: str) -> Path | None:
    """The directory of this name; None: there is none, as far as this user can tell."""
    local = at_home(source)
    return local if is_there(local) and local.is_dir() else None


def why_not(error: Exception, options: Mapping[str, bool]) -> str:
    """Why nothing could be loaded with these options of :func:`where_from`."""
    reason = first_line(error)
    if options.get("local_files_only"):
        return f"{unreachable()}, and it was not downloaded before, or not all of it ({reason})"
    return reason


def first_line(error: Exception) -> str:
    """Of its message, without the full stop; its type if it has none. Libraries write pages."""
    if isinstance(error, pickle.UnpicklingError):  # torch's text advises to run the code in such a file
        return "it is no pickle of tensors and plain values alone"
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def load_tokenizer(source: str, *, key: str, remedy: str) -> Any:
    """A model's tokenizer. Raises RewardSetupError."""
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, "tokenizer", source, key, remedy)


def load_image_processor(source: str, *, key: str, remedy: str) -> Any:
    """A model's image processor, with Pillow's filters. Raises RewardSetupError."""
    from transformers import AutoImageProcessor

    return _loaded(AutoImageProcessor, "image processor", source, key, remedy, backend="pil")


def _loaded(kind: Any, what: str, source: str, key: str, remedy: str, **settings: str) -> Any:
    place, options = where_from(source)
    try:
        return kind.from_pretrained(place, **settings, **options)
    except Exception as error:
        raise RewardSetupError(
            f"{key} is {source!r}, which has no {what}: {why_not(error, options)}. {remedy}"
        ) from error


def find_file(source: str, names: Sequence[str], *, key: str, remedy: str) -> Path:
    """A file, or the first of these names in a directory or at the hub. Raises RewardSetupError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    local, folder = at_home(source), _folder(source)
    if is_there(local) and local.is_file():
        return local
    if folder is not None or source.startswith((".", "/", "~")):
        for name in names if folder else ():
            if (local / name).is_file():
                return local / name
        what = f"holds none of {', '.join(names)}" if folder else "is neither a file nor a directory"
        raise RewardSetupError(f"{key} is {source!r}, which {what}. {remedy}")
    what, away = f"holds none of {', '.join(names)}", unreachable()
    for name in names:
        try:
            return Path(hf_hub_download(source, name, local_files_only=bool(away)))
        except LocalEntryNotFoundError:  # the next one may have been downloaded before
            what = f"was not downloaded before: no {' and no '.join(names)} is here. {away}".rstrip(". ")
        except EntryNotFoundError:
            continue
        except Exception as error:
            reason = first_line(error)
            raise RewardSetupError(
                f"{key} is {source!r}, which cannot be read: {reason}. {remedy}"
            ) from error
    raise RewardSetupError(f"{key} is {source!r}, which {what}. {remedy}")


def read_tensors(path: Path, *, key: str, remedy: str) -> dict[str, torch.Tensor]:
    """The tensors of a ``.safetensors`` file, or of a checkpoint of torch's that holds nothing but tensors.

    A checkpoint may hold them as its ``state_dict``. Code in a pickle is never run.

    Raises:
        RewardSetupError: the file cannot be read.
    """
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = content.get("state_dict", content)
        return {str(name): tensor.detach() for name, tensor in state.items()}
    except Exception as error:
        reason = first_line(error)
        raise RewardSetupError(
            f"{key} is {path}, which holds no readable weights: {reason}. {remedy}"
        ) from error


def converted_state(
    state: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    targets: Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]],
    expected: str,
    computed: Callable[[str, torch.Tensor], bool] = lambda name, tensor: False,
) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors under a model's own names, all of them.

    Args:
        targets: own names and tensors that one of the checkpoint's gives.
        expected: ends the refusals.
        computed: whether the model computes it, so that it gives none.

    Raises:
        RewardSetupError: a name or a shape that does not map, or a weight without a counterpart.
    """
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        parts = dict(targets(name, tensor))
        if not parts.keys() <= own.keys() or not (parts or computed(name, tensor)):
            raise RewardSetupError(f"the tensor {name!r} has no counterpart; {expected}")
        for target, part in parts.items():
            if (wanted := own[target].shape) != part.shape:
                raise RewardSetupError(
                    f"the tensor {name!r} gives {list(part.shape)}, not {list(wanted)}; {expected}"
                )
        converted |= parts
    if missing := sorted(own.keys() - converted.keys()):
        raise RewardSetupError(
            f"{len(missing)} weights are missing, first that of {missing[0]!r}; {expected}"
        )
    return converted


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name by the first of ``names``, patterns of beginnings, that fits; empty if none does."""
    for beginning, replacement in names.items():
        target, fits = re.subn("^" + beginning, replacement, name)
        if fits:
            return target
    return ""


def by_part(target: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under its name; with ``{part}`` in that, query, key and value, which are its thirds."""
    if "{part}" not in target:
        yield target, tensor
        return
    for part, third in zip("qkv", tensor.chunk(3), strict=True):
        yield target.replace("{part}", part), third


def weights_digest(model: torch.nn.Module, unread: str) -> str:
    """Digest of a model's tensors, without those not read."""
    return tensors_digest(
        {name: tensor for name, tensor in model.state_dict().items() if not re.search(unread, name)}
    )


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """Digest of tensors' contents, whatever their names and order."""
    contents = sorted(
        hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).digest()
        for tensor in tensors.values()
        if tensor.numel()
    )
    return hashlib.sha256(b"".join(contents)).hexdigest()[:_DIGEST_CHARS]


def find_device(name: str, key: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU if there is one. Raises RewardSetupError."""
    try:
        best = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(best if name == "auto" else name)
        torch.empty(1, device=device)
    except Exception as error:
        reason = first_line(error)
        raise RewardSetupError(
            f"{key} is {name!r}, which cannot be used ({reason}); expected auto, cpu, cuda or cuda:INDEX."
        ) from error
    return device
