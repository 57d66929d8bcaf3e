"""Policies of installed packages: their settings, by name (entry points ``spotlight.policies``)."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, ValidationError, ValidationInfo

from spotlight.config.section import Section
from spotlight.registry import POLICIES
from spotlight_rewards.registry import ANY_NAME, RegistryError


def _read(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    known = POLICIES.known(without=tuple(POLICIES.built_in))
    read: dict[str, Any] = {}
    for name, settings in given.items():
        known(name, info)
        if isinstance(settings, Section) or (name not in POLICIES and (info.context or {}).get(ANY_NAME)):
            read[name] = settings
            continue
        try:
            section = POLICIES.load(name).section
            read[name] = section.model_validate_json(json.dumps(settings or {}), strict=True)
        except ValidationError as error:
            found = "; ".join(
                f"{name}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
            )
            raise ValueError(f"settings of {name!r} that fit ({found})") from None
        except RegistryError as error:
            raise ValueError(str(error)) from None
    return read


AddedPolicies: TypeAlias = Annotated[dict[str, Any], AfterValidator(_read)]
"""By name, the :class:`~spotlight.config.section.Section` of a policy that another package adds."""
