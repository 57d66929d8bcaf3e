"""DiT families by name. Nothing heavy is imported before a family is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

    from spotlight.models.family import ModelFamily

FAMILIES: Mapping[str, str] = {"qwen-image": "spotlight.models.qwen_image:QwenImage"}
"""Family name -> ``module:class`` with a ``load`` as in :class:`FamilyLoader`. A new family is one line."""


class FamilyLoader(Protocol):
    """How every family is loaded."""

    def __call__(
        self,
        path: str | Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        revision: str | None = None,
        embeddings_cache: Path,
        max_text_tokens: int = 512,
        read_transformer: bool = True,
    ) -> ModelFamily:
        """Load a family from a pipeline directory or hub id (see the family's ``load``).

        With ``read_transformer=False`` the transformer has no weights and refuses to run until
        :func:`spotlight.models.skeleton.filling` was used on it.
        """


def family_loader(name: str) -> FamilyLoader:
    """The ``load`` function of a family.

    Raises:
        ModelError: no family of that name.
    """
    from spotlight.models.model_errors import ModelError

    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is unknown; expected one of {', '.join(sorted(FAMILIES))}")
    module, _, attribute = FAMILIES[name].partition(":")
    return cast(FamilyLoader, getattr(importlib.import_module(module), attribute).load)
