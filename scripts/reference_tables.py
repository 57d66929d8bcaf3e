"""Write what the pages of the reference list in the repository: sections of the configuration, and commands.

    python -m scripts.reference_tables

Each row leads to the file where every key, or every option, has its type, default and meaning. The built site
has them in full (:mod:`scripts.docs_site`), which would double the documentation if it were committed.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import typer
from typer.core import TyperGroup

from scripts.docs_site import DOCS, command_help, commands_of, sections_of
from scripts.marked_part import write_part
from spotlight.cli.main import app
from spotlight.config.schema import RunConfig

REFERENCE = DOCS / "reference"
MARK = "listed by scripts/reference_tables.py"


def sections_table() -> str:
    """A row per section of the configuration, in the file's order."""
    found = {name: sections_of(field.annotation) for name, field in RunConfig.model_fields.items()}
    sections = {name: first for name, each in found.items() if (first := next(each, None)) is not None}
    own = ", ".join(f"`{name}`" for name in found if name not in sections)
    lines = ["| section | what it sets | its keys |", "|---|---|---|", f"| | {own} | {_source(RunConfig)} |"]
    for name, section in sections.items():
        about = _sentence(RunConfig.model_fields[name].description or section.__doc__ or "")
        lines.append(f"| `{name}` | {about} | {_source(section)} |")
    return "\n".join([*lines, ""])


def commands_table() -> str:
    """A row per command."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = ["| command | what it does | its options |", "|---|---|---|"]
    for name, command in commands_of(group):
        about, _ = command_help(command.help or "")
        lines.append(f"| `spotlight {name}` | {_sentence(about)} | {_source(command.callback)} |")
    return "\n".join([*lines, ""])


def _sentence(text: str) -> str:
    first = re.split(r"(?<=[.])\s", " ".join(text.split()).replace("``", "`"))[0]
    return first.rstrip(".").replace("|", "\\|")


def _source(of: object) -> str:
    path = Path(inspect.getsourcefile(inspect.unwrap(of)) or "")  # type: ignore[arg-type]
    return f"[{path.name}]({os.path.relpath(path, REFERENCE)})"


PAGES = {REFERENCE / "configuration.md": sections_table, REFERENCE / "cli.md": commands_table}


def main() -> None:
    """Rewrite the lists."""
    for page, table in PAGES.items():
        write_part(page, MARK, table())


if __name__ == "__main__":
    main()
