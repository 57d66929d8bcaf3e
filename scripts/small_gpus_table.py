"""Write into ``README.md`` what one small GPU can train, by the memory plan of published models.

python scripts/small_gpus_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from spotlight.dry_run.fit.published import published_fits
from spotlight.dry_run.fitting_sizes import USABLE

PAGE = Path(__file__).parents[1] / "README.md"
MARK = "small GPUs: written by scripts/small_gpus_table.py"
GPU_GIB = (12, 16, 24)
_HEAD = "| one GPU of | trains a LoRA of | at the peak |"


def table() -> str:
    """A line for each of :data:`GPU_GIB`, with the models that no smaller one takes, and their peaks."""
    lines, known = [_HEAD, "|---|---|---|"], set[str]()
    for gib in GPU_GIB:
        fitting = [(path, found) for path, found in published_fits(USABLE * gib * 2**30) if found.fits]
        new = [(path, max(found.peaks.values())) for path, found in fitting if path not in known]
        known |= {path for path, _ in fitting}
        models = ", ".join(path.partition("/")[2].removesuffix("-Diffusers") for path, _ in new)
        peaks = [peak / 2**30 for _, peak in new]
        also = "those, and " if len(lines) > 2 else ""
        lines.append(f"| {gib} GB | {also}{models} | {min(peaks):.1f} to {max(peaks):.1f} GiB |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = rf"(<!-- {re.escape(MARK)} -->\n).*?(<!-- end -->)"
    written, number = re.subn(pattern, lambda m: m[1] + table() + m[2], text, flags=re.DOTALL)
    if number != 1:
        raise SystemExit(f"{PAGE} has {number} places marked {MARK!r}; expected one")
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
