"""Public traces by name, in files that the user fetches once. I/O: looks for files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from spotlight_fleet.traces.trace import TraceError
from spotlight_rewards.base.errors import did_you_mean

FOLDER_VARIABLE = "SPOTLIGHT_TRACES"
_BAMBOO = "https://raw.githubusercontent.com/uclasystem/bamboo/main/traces"
_SKYPILOT = (
    "https://raw.githubusercontent.com/skypilot-org/spot-traces/main/availability/16-node/aws-08-27-2023"
)


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """Where a trace comes from.

    Attributes:
        file: its name in :func:`traces_folder`.
        about: what it recorded, and who.
    """

    file: str
    about: str
    url: str


def _skypilot(zone: str) -> PublicTrace:
    about = f"up to 16 p3.2xlarge in {zone}, August 2023 (SkyPilot spot-traces, Can't Be Late, NSDI 24)"
    return PublicTrace(f"skypilot-16-{zone}-v100.json", about, f"{_SKYPILOT}/{zone}_v100_1.json")


def _bamboo(machine: str) -> PublicTrace:
    about = f"{machine} nodes of an AWS autoscaling group, half a day (Bamboo, NSDI 23)"
    return PublicTrace(f"bamboo-{machine}-trace.csv", about, f"{_BAMBOO}/{machine}-trace.csv")


PUBLIC_TRACES: Mapping[str, PublicTrace] = MappingProxyType(
    {
        "bamboo-p3": _bamboo("p3"),
        "bamboo-g4dn": _bamboo("g4dn"),
        **{f"skypilot-{zone}": _skypilot(zone) for zone in ("us-east-2b", "us-west-2a", "us-west-2c")},
    }
)
"""A new one is a line here."""


def traces_folder() -> Path:
    """Where public traces are looked for: ``$SPOTLIGHT_TRACES``, or a folder of the cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "spotlight" / "traces"


def public_trace(name: str) -> Path:
    """The file of a public trace. Raises :class:`TraceError`: unknown, or not fetched yet."""
    known = PUBLIC_TRACES.get(name)
    if known is None:
        remedy = did_you_mean(name, PUBLIC_TRACES, "Use trace.kind=file for a file of your own.")
        raise TraceError(f"trace.name is {name!r}; expected one of {', '.join(PUBLIC_TRACES)}. {remedy}")
    path = traces_folder() / known.file
    if not path.is_file():
        raise TraceError(
            f"trace.name is {name!r}, and {path} is not there; expected its file, which you fetch once: "
            f"curl -fL --create-dirs -o '{path}' {known.url} ({FOLDER_VARIABLE} names another folder)"
        )
    return path
