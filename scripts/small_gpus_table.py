"""Write into ``README.md`` what one small GPU can train, by the memory plan of published models.

python -m scripts.small_gpus_table
"""

from __future__ import annotations

from pathlib import Path

from scripts.marked_part import write_part
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight_plan.commands.fit.published import published_fits

PAGE = Path(__file__).parents[1] / "README.md"
MARK = "small GPUs: written by scripts/small_gpus_table.py"
GPU_GIB = (12, 16, 24)
_PRECISIONS = {"none": "in bfloat16", "int8": "in int8", "nf4": "in NF4"}


def table() -> str:
    """A line for each of :data:`GPU_GIB`: its models by what their base is held in, the first that fits."""
    lines = [f"| one GPU of | {' | '.join(_PRECISIONS.values())} |", f"|---|{'---|' * len(_PRECISIONS)}"]
    known = set[str]()
    for gib in GPU_GIB:
        fitting = [(path, found.config) for path, found in published_fits(USABLE * gib * 2**30) if found.fits]
        cells = [
            [
                _name(path)
                for path, config in fitting
                if config.model.quantize == quantize and path not in known
            ]
            for quantize in _PRECISIONS
        ]
        if known:
            cells[0].insert(0, "those")
        known |= {path for path, config in fitting if config.model.quantize == "none"}
        lines.append(f"| {gib} GB | {' | '.join(map(', '.join, cells))} |")
    return "\n".join([*lines, ""])


def _name(path: str) -> str:
    return path.partition("/")[2].removesuffix("-Diffusers")


def main() -> None:
    """Write the table into the page."""
    write_part(PAGE, MARK, table())


if __name__ == "__main__":
    main()
