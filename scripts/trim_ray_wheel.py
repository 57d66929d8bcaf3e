"""Write a wheel of Ray without what Spotlight does not use, 29 instead of 79 MB, to carry it somewhere.

python scripts/trim_ray_wheel.py ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl wheels
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

UNUSED = ("jars", "rllib", "serve", "tune", "train", "data", "llm", "cpp", "dashboard/client")


def trim(source: Path, directory: Path) -> None:
    """Copy the rest, compressed with LZMA, which pip reads."""
    left_out = tuple(f"ray/{name}/" for name in UNUSED)
    target = directory / source.name
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as rest:
        for entry in whole.infolist():
            if not entry.filename.startswith(left_out):
                content = whole.read(entry)
                entry.compress_type = zipfile.ZIP_LZMA
                rest.writestr(entry, content)


if __name__ == "__main__":
    trim(Path(sys.argv[1]), Path(sys.argv[2]))
