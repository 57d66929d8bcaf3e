"""SkyPilot's published catalogues: one CSV file for each cloud, dated by its last change. I/O.

https://github.com/skypilot-org/skypilot-catalog. The files differ: some have no zones, no spot prices, or
machines without any price. A cloud whose file is missing, late or of another form is named in
:attr:`PriceQuery.unread`, unless it was asked for by name: one broken file is no reason to know no price.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spotlight_plan.prices.catalogue import parse_catalogue
from spotlight_plan.prices.fetch import get_text
from spotlight_plan.prices.quotes import PriceError, Quote, with_caveat

if TYPE_CHECKING:
    from spotlight_plan.prices.sources import PriceQuery

NAME = "skypilot"
FILES_URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master"
COMMITS_URL = "https://api.github.com/repos/skypilot-org/skypilot-catalog/commits"
PATH = "catalogs/v8/{}/vms.csv"
CLOUDS = (
    "aws",
    "azure",
    "cudo",
    "do",
    "fluidstack",
    "gcp",
    "hyperbolic",
    "hyperstack",
    "ibm",
    "jarvislabs",
    "lambda",
    "lium",
    "mithril",
    "nebius",
    "oci",
    "paperspace",
    "primeintellect",
    "runpod",
    "scaleway",
    "scp",
    "seeweb",
    "shadeform",
    "simplepod",
    "spheron",
    "vast",
    "verda",
    "yotta",
)
"""All that had a file in 2026; Kubernetes and Slurm are no clouds, and have no prices of their own."""
_AT_ONCE = 8


def prices(question: PriceQuery) -> tuple[Quote, ...]:
    """Prices of the clouds asked for, or of all, cached while fresh.

    Raises:
        PriceError: no cloud's file could be read, or not that of a cloud asked for by name.
    """
    wanted = [cloud for cloud in CLOUDS if not question.clouds or cloud in question.clouds]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda cloud: _answer(cloud, question), wanted))
    failed = {cloud: answer for cloud, answer in zip(wanted, answers, strict=True) if isinstance(answer, str)}
    if failed and (question.clouds or len(failed) == len(wanted)):
        raise PriceError(next(iter(failed.values())))
    question.unread.update(failed)
    return tuple(quote for answer in answers if not isinstance(answer, str) for quote in answer)


def _answer(cloud: str, question: PriceQuery) -> tuple[Quote, ...] | str:
    try:
        return _of(cloud, question)
    except PriceError as error:
        return str(error)


def _of(cloud: str, question: PriceQuery) -> tuple[Quote, ...]:
    path = PATH.format(cloud)
    url = f"{FILES_URL}/{path}"

    def get() -> list[str]:
        text = get_text(url, question.limits)
        try:
            changed = get_text(COMMITS_URL, question.limits, {"path": path, "per_page": "1"})
        except PriceError as error:
            changed = str(error)
        return [text, changed]

    def read(texts: Sequence[str], came: datetime) -> tuple[Quote, ...]:
        text, answer = texts
        changed = _date(answer)
        skipped: list[str] = []
        found = parse_catalogue(
            text, cloud=cloud, source=url, as_of=changed or came, gpus=question.gpus, skipped=skipped
        )
        caveats = [] if changed else ["of unknown age: GitHub did not tell when the file changed"]
        if skipped:
            caveats.append(f"{len(skipped)} rows of this file were skipped, such as {skipped[0]}")
        return with_caveat(found, "; ".join(caveats)) if caveats else found

    return question.cache.quotes(f"skypilot {url}", get, read, question.now)


def _date(answer: str) -> datetime | None:
    """When the newest of GitHub's listed commits was made; None if the answer is something else."""
    try:
        text = json.loads(answer)[0]["commit"]["committer"]["date"]
        date = datetime.fromisoformat(text)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
