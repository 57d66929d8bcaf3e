"""DiT families by name (:data:`spotlight.registry.FAMILIES`), imported when loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from spotlight.registry import FAMILIES, resolve

if TYPE_CHECKING:
    from spotlight.models.family import FamilyLoader


def family_loader(name: str) -> FamilyLoader:
    """The ``load`` function of a family.

    Raises:
        RegistryError: unknown family.
    """
    return cast("FamilyLoader", resolve(FAMILIES.load(name).loader))
