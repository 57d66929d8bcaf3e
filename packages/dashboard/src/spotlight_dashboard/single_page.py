"""The page of one run as one file that needs no network: page, charts, answers and pictures inlined."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spotlight_dashboard.answers import RunAnswers
from spotlight_dashboard.figures import Json
from spotlight_dashboard.page_files import PAGE_FILES, page_file, plotly_file
from spotlight_dashboard.report_pictures import PictureBudget
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.overview import headline
from spotlight_rewards.base.output_files import require_place, write_file

_EVALUATIONS_MAX, _TRAINED_MAX, _TRAINED_SHARE = 12, 6, 0.05
_CURVES_MAX, _LOGS_MAX = 300, 5
_UNESCAPED = "!'()*~-_."
"""By JavaScript's encodeURIComponent."""
_PLAIN = ("overview", "accounting", "pictures", "cluster", "money", "samples", "log", "metrics")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing is fetched, whatever the run's texts hold."""


def write_page(run: RunFolder, target: Path) -> None:
    """Write the run's page.

    Raises:
        StoreError: the run cannot be read, or Plotly's package is missing.
        ConfigError: the file cannot be written.
    """
    require_place(target)
    write_file(target, single_page(run))


def single_page(run: RunFolder) -> str:
    """The page's HTML. Raises StoreError as :func:`write_page` does."""
    with run.values():
        inlined = json.dumps(_inlined(run), allow_nan=False).replace("<", "\\u003c")
    scripts = [
        plotly_file().read_text(encoding="utf-8"),
        *(_page_text(name) for name in PAGE_FILES if name.endswith(".js")),
    ]
    parts = [
        f'<script type="application/json" id="inlined">{inlined}</script>',
        *(f"<script>\n{_script(text)}\n</script>" for text in scripts),
    ]
    html = _page_text("index.html")
    head, _, rest = html.partition('<link rel="stylesheet" href="page/dashboard.css">')
    body, _, tail = rest.partition('<script src="page/basics.js"></script>')
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    style = f"<style>\n{_page_text('dashboard.css')}</style>"
    return (
        head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}')
        + style
        + body
        + ("\n".join(parts) + "\n</body>" + tail.partition("</body>")[2])
    )


def _inlined(run: RunFolder) -> Json:
    given = RunAnswers()
    answers: dict[str, Json | None] = {what: given.answer(run, what, {}) for what in _PLAIN}
    answers["audit"] = given.answer(run, "audit", {"now": "1"})
    for name in [each["name"] for each in _listed(answers["metrics"], "names")][:_CURVES_MAX]:
        answers[_key("curve", name=name)] = given.answer(run, "curve", {"name": name})
    moved = answers[_key("samples", moved="1")] = given.answer(run, "samples", {"moved": "1"})
    listed = _listed(answers["samples"], "samples") + _listed(moved, "samples")
    for name in dict.fromkeys(each["id"] for each in listed):
        answers[_key("sample", id=name)] = given.answer(run, "sample", {"id": name})
    for name in _listed(answers["log"], "logs")[:_LOGS_MAX]:
        answers[_key("logfile", name=name)] = given.answer(run, "logfile", {"name": name})
    drawn = _drawn(answers["pictures"], "iterations", _EVALUATIONS_MAX)
    budget = PictureBudget()
    trained, shown = [], []
    for iteration in _drawn(answers["pictures"], "training", _TRAINED_MAX):
        groups = given.answer(run, "training", {"iteration": str(iteration)})
        taken = budget.take(run, groups or {}, share=_TRAINED_SHARE, whole=False, kind="training")
        if taken is not None:
            answers[_key("training", iteration=str(iteration))] = taken
            trained.append(iteration)
    for place, iteration in enumerate(drawn):
        evaluation = given.answer(run, "evaluation", {"iteration": str(iteration)})
        # The first and the last, which are compared, may be of some prompts only; those between are not.
        share = 0.5 if place == 0 and len(drawn) > 1 else 1.0
        taken = budget.take(run, evaluation or {}, share=share, whole=place > 1)
        if taken is not None:
            answers[_key("evaluation", iteration=str(iteration))] = taken
            shown.append(iteration)
    answers["pictures"] = {"iterations": sorted(shown), "training": sorted(trained)}
    return {"run": headline(run), "answers": answers, "pictures": budget.taken, "made_at": time.time()}


def _drawn(answer: Json | None, kind: str, most: int) -> list[int]:
    """At most so many iterations: first and last before those between, evenly."""
    iterations = _listed(answer, kind)
    if len(iterations) > most:
        last = len(iterations) - 1
        places = {round(at * last / (most - 1)) for at in range(most)}
        iterations = [iterations[place] for place in sorted(places)]
    return [*iterations[:1], *iterations[:0:-1]]


def _listed(answer: Json | None, what: str) -> list[Any]:
    found = answer[what] if answer else []
    assert isinstance(found, list)
    return found


def _key(what: str, **query: str) -> str:
    """As the page makes it of what it asks for."""
    return f"{what}?" + "&".join(
        f"{key}={quote(text, _UNESCAPED, errors='replace')}" for key, text in query.items()
    )


def _page_text(name: str) -> str:
    return page_file(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Safe inside a script element: within JavaScript, ``<\\/`` is ``</``."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
