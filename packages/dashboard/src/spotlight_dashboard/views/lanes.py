"""What each worker did when: lanes of phases, and what hit its node, from the ledger's bills.

The ledger bills a worker's seconds one after the other from when it joined, each to one phase. Their running
sum is therefore the time of each; within one bill (on Ray, of 5 to 60 s) the order of phases is that in
which they were booked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from sqlite3 import Connection

from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import RunFolder

LANES_MAX = 40
_CELLS = 500
"""Of a lane: shorter stretches are drawn as the phase that takes most of a cell."""
_EVENTS_MAX = 2000
PHASES = tuple(phase.value for phase in Phase)


@dataclass(slots=True)
class _Lane:
    worker: str
    attempt: int
    price_usd_h: float
    joined_at: float
    left_at: float
    clock: float
    stretches: list[tuple[float, float, str]] = field(default_factory=list)


def part_of(worker: str) -> str:
    """The node of a worker, which incidents name: ``spot-3/learner`` of ``spot-3/learner/0``."""
    return worker.rpartition("/")[0] or worker


def node_of(worker: str) -> str:
    """The machine of a worker: ``spot-3`` of ``spot-3/0`` and of ``spot-3/learner/0``."""
    return queries.machine_of(part_of(worker))


def lanes(run: RunFolder, last_s: float | None = None, page: int = 0) -> Json:
    """The lanes of the run's last ``last_s`` seconds (None: of all), :data:`LANES_MAX` a page, newest first.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    with run.reading_ledger() as connection:
        found = _known(connection)
        end = max((lane.left_at for lane in found.values()), default=0.0)
        first = min((lane.joined_at for lane in found.values()), default=0.0)
        start = first if last_s is None else max(first, end - last_s)
        shown = [lane for lane in found.values() if lane.left_at > start]
        drawn = _in_order(shown, page)
        for attempt, worker, phase, seconds in _bills(connection, drawn):
            lane = found[attempt, worker]
            if lane.clock + seconds > start:
                lane.stretches.append((max(lane.clock, start), lane.clock + seconds, phase))
            lane.clock += seconds
        on_spot = spot_nodes(connection)
        events = connection.execute(
            "SELECT at, kind, subject, spot, detail FROM incidents WHERE at >= ? ORDER BY id DESC LIMIT ?",
            (start, _EVENTS_MAX),
        ).fetchall()
    cell_s = (end - start) / _CELLS
    return {
        "start": start,
        "end": end,
        "first": first,
        "phases": PHASES,
        "lanes": [_drawn(found[key], cell_s) for key in drawn],
        "total": len(shown),
        "page": page,
        "page_size": LANES_MAX,
        "events": [
            {"at": at, "kind": kind, "subject": subject, "spot": bool(spot), "detail": detail}
            for at, kind, subject, spot, detail in reversed(events)
        ],
        "prices": {
            kind: _price_steps(
                [lane for lane in shown if (node_of(lane.worker) in on_spot) == spot], start, end
            )
            for kind, spot in (("spot", True), ("reserved", False))
        },
    }


def spot_nodes(connection: Connection) -> set[str]:
    """The names of all spot machines that ever joined."""
    rows = connection.execute("SELECT DISTINCT subject FROM incidents WHERE kind = 'node_joined' AND spot")
    return {queries.machine_of(subject) for (subject,) in rows}


def _price_steps(lanes: list[_Lane], start: float, end: float) -> list[tuple[float, float | None]]:
    """What the newest of the workers that were there cost in USD an hour, from each time on; None: none was.

    At most :data:`_EVENTS_MAX` changes, the newest.
    """
    stayed = [lane for lane in lanes if lane.left_at > lane.joined_at]
    changes = [(max(start, lane.joined_at), 1, lane) for lane in stayed]
    changes += [(lane.left_at, 0, lane) for lane in stayed if lane.left_at < end]
    there: dict[int, _Lane] = {}
    steps: list[tuple[float, float | None]] = []
    for at, joins, lane in sorted(changes, key=lambda change: (*change[:2], change[2].joined_at)):
        if joins:
            there[id(lane)] = lane
        else:
            there.pop(id(lane), None)
        price = next(reversed(there.values())).price_usd_h if there else None
        if steps and steps[-1][0] == at:
            steps.pop()
        if not steps or steps[-1][1] != price:
            steps.append((at, price))
    return steps[-_EVENTS_MAX:]


def _known(connection: Connection) -> dict[tuple[int, str], _Lane]:
    """All lanes, without what they did, by attempt and worker; the newest first."""
    rows = connection.execute(
        "SELECT attempt, worker, attempt_workers.price_usd_h, joined_at, COALESCE(left_at, ended_at, seen_at)"
        " FROM attempt_workers JOIN attempts ON number = attempt ORDER BY joined_at DESC, worker"
    )
    return {
        (attempt, worker): _Lane(worker, attempt, price, joined, left, joined)
        for attempt, worker, price, joined, left in rows
    }


def _bills(connection: Connection, lanes: list[tuple[int, str]]) -> Iterator[tuple[int, str, str, float]]:
    """The bills of these lanes; the table also holds those of all other pages."""
    if not lanes:
        return iter(())
    chosen = ", ".join("(?, ?)" for _ in lanes)
    return connection.execute(
        "SELECT attempt, worker, phase, seconds FROM gpu_seconds"
        f" WHERE (attempt, worker) IN (VALUES {chosen}) ORDER BY id",
        [part for lane in lanes for part in lane],
    )


def _in_order(shown: list[_Lane], page: int) -> list[tuple[int, str]]:
    """The keys of a page's lanes, a node's side by side."""
    chosen = shown[page * LANES_MAX : (page + 1) * LANES_MAX]
    chosen.sort(key=lambda lane: (lane.joined_at, lane.worker))
    return [(lane.attempt, lane.worker) for lane in chosen]


def _drawn(lane: _Lane, cell_s: float) -> Json:
    return {
        "worker": lane.worker,
        "node": part_of(lane.worker),
        "attempt": lane.attempt,
        "usd_h": lane.price_usd_h,
        "from": lane.joined_at,
        "to": lane.left_at,
        "billed_s": lane.clock - lane.joined_at,
        "stretches": [[begin, end, PHASES.index(phase)] for begin, end, phase in _merged(lane, cell_s)],
    }


def _merged(lane: _Lane, cell_s: float) -> Iterator[tuple[float, float, str]]:
    """Neighbours of one phase as one; what is shorter than a cell goes to the phase with most of the cell."""
    pending: dict[str, float] = {}
    begin = end = None
    previous: tuple[float, float, str] | None = None
    for start, stop, phase in [*lane.stretches, (float("inf"), float("inf"), "")]:
        if begin is not None and end is not None and (start - begin >= cell_s or stop - start >= cell_s):
            most = max(pending, key=pending.__getitem__)
            if previous is not None and previous[2] == most:
                previous = (previous[0], end, most)
            else:
                if previous is not None:
                    yield previous
                previous = (begin, end, most)
            pending, begin = {}, None
        begin = start if begin is None else begin
        end = stop
        pending[phase] = pending.get(phase, 0.0) + stop - start
    if previous is not None:
        yield previous
