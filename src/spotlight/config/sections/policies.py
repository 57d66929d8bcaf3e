"""Settings of other packages' policies, by name (two groups of entry points)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from spotlight.config.section import Section, stated
from spotlight.registry import FLEET_POLICIES, POLICIES
from spotlight_rewards.base.errors import did_you_mean
from spotlight_rewards.registry import ANY_NAME, RegistryError

_REGISTRIES = (POLICIES, FLEET_POLICIES)
_KEYS = {
    "exploration": "exploration",
    "next-iteration": "pipeline.next_share",
    "overlap": "pipeline.axis",
    "spot-learner": "fleet.learner_placement",
    "subset": "algorithm.train_samples",
    "target": "fleet.target",
    "trainers": "pipeline.trainers_generate",
    "whole-groups": "rewards",
}
"""What switches each built-in policy on."""


def policy_section(name: str) -> type[Section] | None:
    """Of a policy that an installed package adds; None for other names. Raises RegistryError."""
    for one in _REGISTRIES:
        if name in one and name not in one.built_in:
            return one.load(name).section
    return None


def _read(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    any_name = bool((info.context or {}).get(ANY_NAME))
    read: dict[str, Any] = {}
    wrong: list[InitErrorDetails] = []
    for name, settings in given.items():
        try:
            if name in _KEYS:
                remedy = f"Leave it out: {_KEYS[name]} switches that policy on."
                fault = stated("a built-in policy", "policies of installed packages only", remedy)
                wrong.append(InitErrorDetails(type=fault, loc=(name,), input=settings))
            elif isinstance(settings, Section):
                read[name] = settings
            elif (section := policy_section(name)) is not None:
                read[name] = section.model_validate_json(json.dumps(settings or {}), strict=True)
            elif any_name:
                read[name] = settings
            else:
                wrong.append(InitErrorDetails(type=_unknown(name), loc=(name,), input=settings))
        except RegistryError as error:
            fault = stated("a policy that cannot be loaded", "one that can", str(error))
            wrong.append(InitErrorDetails(type=fault, loc=(name,), input=settings))
        except ValidationError as error:
            wrong += _inside(name, error)
    if wrong:
        raise ValidationError.from_exception_data("policies", wrong, input_type="json")
    return read


def _unknown(name: str) -> PydanticCustomError:
    added = [other for one in _REGISTRIES for other in one if other not in one.built_in]
    known = " or ".join(map(repr, added)) or "nothing, as no installed package has a policy"
    groups = " and ".join(one.group for one in _REGISTRIES)
    remedy = did_you_mean(name, added, f"Install the package that adds {name!r}, or leave it out.")
    return stated("an unknown policy", f"{known} (entry points {groups})", remedy)


def _inside(name: str, error: ValidationError) -> Iterator[InitErrorDetails]:
    for each in error.errors():
        kind = PydanticCustomError(each["type"], each["msg"])
        yield InitErrorDetails(type=kind, loc=(name, *each["loc"]), input=each["input"])


AddedPolicies: TypeAlias = Annotated[dict[str, Any], AfterValidator(_read)]
"""By name, the :class:`~spotlight.config.section.Section` of a policy that another package adds."""
