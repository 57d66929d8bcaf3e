"""How the linear layers of a frozen base are held (``model.quantize``): the layers are of spotlight-kernels.

All those inside of blocks are held in few bits, modulation included; embedders and the last layer are not.
A layer is quantised as its weight is read, so a model is never whole in memory in another type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from spotlight_files.model_errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spotlight_kernels.quantised.linear import QuantisedLinear, StoredWeight

Quantize = Literal["none", "int8", "nf4"]
_OF_A_BLOCK = re.compile(r"(transformer(_\d+)?\.)?\w+\.\d+\.")
"""How names begin inside of the lists of blocks of a transformer, or of one of several."""


def is_held(layer: str) -> bool:
    """Whether the linear layer of this name is held in few bits."""
    return _OF_A_BLOCK.match(layer) is not None


def held_of(layers: Iterable[str], quantize: Quantize) -> list[str]:
    """Those of a transformer's linear layers that are held in few bits. Raises ModelError if none is."""
    found = [name for name in layers if is_held(name)]
    if not found:
        raise ModelError(
            f"model.quantize is {quantize!r}, and no linear layer of this transformer is inside of a list of "
            "blocks, as blocks.0.attn.to_q is; expected some. Set model.quantize=none"
        )
    return found


def held_bytes(quantize: Literal["int8", "nf4"], outputs: int, inputs: int) -> int:
    """Memory of a layer's weight."""
    from spotlight_kernels.quantised import BYTES

    return BYTES[quantize](outputs, inputs)


def hold(model: nn.Module, quantize: Quantize) -> None:
    """Let the layers of a model, on the meta device, hold what is to be read in few bits.

    Raises:
        ModelError: none is to.
    """
    from torch import nn

    from spotlight_kernels.quantised.int8 import Int8Linear
    from spotlight_kernels.quantised.nf4 import Nf4Linear

    if quantize == "none":
        return
    kind = {"int8": Int8Linear, "nf4": Nf4Linear}[quantize]
    linears = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for name in held_of(linears, quantize):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(linears[name]))


def held(model: nn.Module) -> dict[str, QuantisedLinear]:
    """The layers that :func:`hold` made, by their names without adapters."""
    from spotlight_kernels.quantised.linear import QuantisedLinear

    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, QuantisedLinear))
    return {name.removesuffix(".base_layer"): layer for name, layer in layers}


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """Views of what those layers hold, by name."""
    layers = held(model).items()
    return {
        f"{name}.{part}": getattr(layer, part).detach() for name, layer in layers for part in layer.parts()
    }


def as_stored(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | StoredWeight]:
    """A model's tensors under their names in its files: whole weights in the place of what is packed."""
    packed = packed_state(model)
    own = {name: tensor for name, tensor in tensors.items() if name not in packed}
    return own | {f"{name}.weight": layer.stored for name, layer in held(model).items()}
