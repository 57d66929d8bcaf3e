"""The part of a page that a script writes: between ``<!-- MARK -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from pathlib import Path


def read_part(page: Path, mark: str) -> str:
    """What stands there. Raises SystemExit if the page has no such mark, or several."""
    found = _place(mark).findall(page.read_text(encoding="utf-8"))
    if len(found) != 1:
        raise SystemExit(f"{page} has {len(found)} places marked {mark!r}; expected one")
    return str(found[0])


def write_part(page: Path, mark: str, text: str) -> None:
    """Replace it; raises as :func:`read_part`."""
    read_part(page, mark)
    page.write_text(_place(mark).sub(lambda _: text, page.read_text(encoding="utf-8")), encoding="utf-8")


def _place(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {re.escape(mark)} -->\n).*?(?=<!-- end -->)", re.DOTALL)
