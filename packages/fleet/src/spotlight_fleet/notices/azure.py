"""Azure: scheduled events that end the processes of this VM.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. Polled every second, as Azure
advises: a Spot VM is evicted 30 s after the event appears. The first response enables the service, which may
take two minutes. Events concern all VMs of a scale or availability set and are matched by this VM's name. One
that vanishes was cancelled; one that finished has ended the VM. Freeze is ignored: it lasts seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight_fleet.notices.metadata import MetadataAnswer, MetadataServer, parse_http_date
from spotlight_fleet.notices.notice import Cloud, NoticeReading, NoticeTrouble, PendingNotice

VM = "/metadata/instance/compute?api-version=2021-02-01"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
ENDS_PROCESSES = ("Preempt", "Terminate", "Reboot", "Redeploy")
_HEADERS = {"Metadata": "true"}


@dataclass(frozen=True, slots=True)
class _AzureEvent:
    """An event that affects this VM, and no other if ``alone``."""

    pending: PendingNotice
    alone: bool


@dataclass(slots=True)
class AzureNotices:
    """Polls the instance metadata service.

    Attributes:
        answer_s: time-out per response.
        first_answer_s: time-out of the first response about events.
    """

    server: MetadataServer
    period_s: float = 1.0
    answer_s: float = 5.0
    first_answer_s: float = 150.0
    name: str = field(default="azure", init=False)
    _vm: str = field(default="", init=False)
    _switched_on: bool = field(default=False, init=False)
    _events: tuple[_AzureEvent, ...] = field(default=(), init=False)

    async def read(self) -> NoticeReading:
        """See :class:`NoticeSource`."""
        await self.probe()
        patience_s = self.answer_s if self._switched_on else self.first_answer_s
        answer = await self.server.ask(EVENTS, _HEADERS, patience_s)
        answer.require_ok()
        self._switched_on = True
        self._events = parse_events(answer, self._vm)
        return NoticeReading(tuple(event.pending for event in self._events))

    async def acknowledge(self) -> bool:
        """Let events start that affect no other VM; this VM may be gone at once.

        Azure starts an event on all of its VMs when one acknowledges it, and the others may not be drained.
        """
        ready = [{"EventId": event.pending.key} for event in self._events if event.alone]
        if not ready:
            return False
        answer = await self.server.ask(
            EVENTS, _HEADERS, self.answer_s, method="POST", body=json.dumps({"StartRequests": ready})
        )
        answer.require_ok()
        return True

    async def probe(self) -> None:
        """Read the VM's name. Raises :class:`MetadataError` if this is not Azure."""
        if self._vm:
            return
        answer = await self.server.ask(VM, _HEADERS, self.answer_s)
        answer.require_ok()
        name = answer.json_object().get("name")
        if not isinstance(name, str) or not name:
            raise answer.error(NoticeTrouble.BROKEN, f"sent the name {name!r}", "the VM's name")
        self._vm = name


def parse_events(answer: MetadataAnswer, vm: str) -> tuple[_AzureEvent, ...]:
    """Events that end ``vm``'s processes. Raises :class:`MetadataError` if any event cannot be read."""
    events = answer.json_object().get("Events")
    if not isinstance(events, list):
        raise answer.error(NoticeTrouble.BROKEN, f"sent Events {events!r:.80}", "a list")
    found = []
    for index, event in enumerate(events):
        place = f"Events[{index}]"
        if not isinstance(event, dict):
            raise answer.error(NoticeTrouble.BROKEN, f"sent {place} {event!r:.80}", "an object")
        kind, names = _text(answer, place, event, "EventType"), _names(answer, place, event)
        if kind in ENDS_PROCESSES and vm.casefold() in names:
            found.append(_AzureEvent(_pending(answer, place, event, kind), alone=len(set(names)) == 1))
    return tuple(found)


def _pending(answer: MetadataAnswer, place: str, event: Mapping[str, object], kind: str) -> PendingNotice:
    key, before = _text(answer, place, event, "EventId"), event.get("NotBefore")
    if not before or event.get("EventStatus") == "Started":
        return PendingNotice(key, "started", 0.0, f"{kind} has begun (event {key})")
    deadline = parse_http_date(before) if isinstance(before, str) else None
    if deadline is None:
        expected = "a date such as Mon, 19 Sep 2016 18:29:47 GMT"
        raise answer.error(NoticeTrouble.BROKEN, f"sent {place}.NotBefore {before!r}", expected)
    detail = f"{kind} not before {before} (event {key})"
    return PendingNotice(key, str(before), answer.remaining_s(deadline), detail)


def _text(answer: MetadataAnswer, place: str, event: Mapping[str, object], key: str) -> str:
    value = event.get(key)
    if not isinstance(value, str) or not value:
        raise answer.error(NoticeTrouble.BROKEN, f"sent {place}.{key} {value!r:.80}", "a text")
    return value


def _names(answer: MetadataAnswer, place: str, event: Mapping[str, object]) -> Sequence[str]:
    """VM names, which are case-insensitive on Azure."""
    value = event.get("Resources")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise answer.error(
            NoticeTrouble.BROKEN, f"sent {place}.Resources {value!r:.80}", "a list of VM names"
        )
    return [name.casefold() for name in value]


AZURE = Cloud(AzureNotices, prices="spotlight_plan.prices.azure_prices:prices")
