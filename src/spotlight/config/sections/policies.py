"""Settings of other packages' policies, by name (two groups of entry points)."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, ValidationError, ValidationInfo

from spotlight.config.section import Section
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


def _read(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    any_name = bool((info.context or {}).get(ANY_NAME))
    added = {name: one for one in _REGISTRIES for name in one if name not in one.built_in} if given else {}
    read: dict[str, Any] = {}
    for name, settings in given.items():
        if name in _KEYS:
            raise ValueError(f"no {name!r} here: {_KEYS[name]} switches that policy on")
        if isinstance(settings, Section) or (name not in added and any_name):
            read[name] = settings
            continue
        if name not in added:
            names = ", ".join(map(repr, added)) or "none: no installed package has one"
            raise ValueError(
                f"the name of a policy of an installed package ({names}; entry points "
                f"{' and '.join(one.group for one in _REGISTRIES)}). {did_you_mean(name, added, '')}".rstrip()
            )
        try:
            read[name] = _section(added[name].load(name).section, name, settings)
        except RegistryError as error:
            raise ValueError(str(error)) from None
    return read


def _section(section: type[Section], name: str, settings: object) -> Section:
    try:
        return section.model_validate_json(json.dumps(settings or {}), strict=True)
    except ValidationError as error:
        found = "; ".join(
            f"{name}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        keys = ", ".join(map(repr, section.model_fields)) or "none"
        raise ValueError(f"settings of {name!r} that fit ({found}); its keys: {keys}") from None


AddedPolicies: TypeAlias = Annotated[dict[str, Any], AfterValidator(_read)]
"""By name, the :class:`~spotlight.config.section.Section` of a policy that another package adds."""
