"""MkDocs hook: the reference of keys and commands, and links that lead out of ``docs/``.

The pages of ``docs/reference/`` hold a marker where this puts what the sources say: nothing generated is
committed. Links to files of the repository outside ``docs/`` lead to ``repo_url`` where ``mkdocs.yml`` has
one, and are plain text otherwise.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import AfterValidator, BaseModel, PlainSerializer, PlainValidator, SerializeAsAny
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperGroup, TyperOption

from spotlight.cli.main import app
from spotlight.config.schema import RunConfig
from spotlight.config.section import Section
from spotlight.config.sections.algorithm import AlgorithmSection
from spotlight.registry import ALGORITHMS
from spotlight.runtime.resuming.course import mark_of
from spotlight_rewards.base.strict_section import STATE, WhenResumed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = ("RELIABILITY.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository's root that the site shows, too."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):<code>~?([^<]+)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the markers, and lead links to where the site has their targets."""
    for marker, make in PARTS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    here = page.file.src_uri
    folder = ROOT if here in ROOT_PAGES else (DOCS / here).parent

    def lead(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        found = (folder / target).resolve()
        if found.is_dir() and (found / "README.md").exists():
            found /= "README.md"
        if found.is_relative_to(DOCS):
            place = str(found.relative_to(DOCS))
        elif found.name in ROOT_PAGES and found.parent == ROOT:
            place = found.name
        elif config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{found.relative_to(ROOT)})"
        else:
            return text
        return f"{image}[{text}]({os.path.relpath(place, Path(here).parent)}{anchor or ''})"

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the roles of docstrings (``:class:`` and its kin) as code."""
    return _ROLE.sub(lambda match: f"<code>{match[1]}</code>", html)


# -- configuration -----------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Every key with type, default and description, section by section."""
    lines = [
        "A YAML file of these keys, dotted overrides on the command line, or both:",
        "`spotlight train run.yaml rollout.steps=8`. An unknown key is an error. Keys marked * may "
        "change when a run goes on, or by a command that names the run "
        "([which, and what else can be done](../howto/resume-and-audit.md#change-a-runs-course)).",
        "",
        *_section(RunConfig, RunConfig(), "", set()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(
    section: type[BaseModel], value: BaseModel | None, prefix: str, shown: set[tuple[str, str]]
) -> Iterator[str]:
    """Args: value: the defaults in this place, which may differ from the section's own."""
    rows, deeper = [], []
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        here = field.get_default() if value is None else getattr(value, name)
        sections = list(dict.fromkeys(sections_of(field.annotation)))
        deeper += [(key, field, found, here, len(sections) > 1) for found in sections]
        if not sections or _default(field, here) is not None:
            star = "*" if mark_of(RunConfig(), key) not in (None, STATE) else ""
            kind, default = _type(field.annotation, field.metadata), _default(field, here)
            rows.append(f"| `{key}`{star} | {kind} | {default} | {_cell(field.description)} |")
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *rows, "")
    for key, field, found, here, alternative in deeper:
        value = here if type(here) is found else None if _is_required(found) else found()
        entry = (key, repr(value if value is not None else found))
        if entry in shown:  # algorithms share sections
            continue
        shown.add(entry)
        title = f"`{key}`" + (f", `name: {found.model_fields['name'].default}`" if alternative else "")
        yield from (f"{'#' * min(2 + prefix.count('.'), 4)} {title}", "")
        if not prefix or alternative or found.__doc__ != field.description:
            yield from (textwrap.dedent(found.__doc__ or "").strip().replace("``", "`"), "")
        yield from _section(found, value, f"{key}.", shown)


def _is_required(section: type[BaseModel]) -> bool:
    return any(field.is_required() for field in section.model_fields.values())


def sections_of(annotation: object) -> Iterator[type[BaseModel]]:
    if annotation is AlgorithmSection:
        yield from (ALGORITHMS.load(name) for name in ALGORITHMS.built_in)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from sections_of(argument)


def _type(annotation: object, constraints: Sequence[object] = ()) -> str:
    if words := [_constraint(each) for each in constraints if not isinstance(each, WhenResumed)]:
        return f"{_type(annotation)} {', '.join(words)}"
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_type(argument) for argument in typing.get_args(annotation))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        inner = arguments[1].metadata if isinstance(arguments[1], FieldInfo) else arguments[1:]
        return _type(arguments[0], inner)
    if origin is tuple:
        number = "" if arguments[-1] is Ellipsis else f"{len(arguments)} times "
        return f"list of {number}{_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if annotation is type(None):
        return "null"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true, false", "Path": "path"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, "section")


_RANGES = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _constraint(constraint: object) -> str:
    """One of pydantic's constraints in words: ``> 0``."""
    for attribute, sign in _RANGES.items():
        if (bound := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {bound}"
    if (pattern := getattr(constraint, "pattern", None)) is not None:
        return f"matching `{pattern}`"
    if (length := getattr(constraint, "min_length", None)) is not None:
        return f"of at least {length}"
    if isinstance(constraint, AfterValidator):
        return "that is registered"
    if isinstance(constraint, PlainValidator | PlainSerializer | SerializeAsAny):
        return ""
    raise ValueError(f"no words for the constraint {constraint!r}; add them here")


def _default(field: FieldInfo, default: object) -> str | None:
    """As in YAML; None for a section, whose keys are listed instead."""
    if field.is_required():
        return "required"
    if isinstance(default, BaseModel):
        return None
    if isinstance(default, tuple) and default and isinstance(default[0], BaseModel):
        default = [item.model_dump(mode="json", exclude_unset=True) for item in default]
    text = json.dumps(default, default=str)
    return f"`{text.strip(chr(34)) if text.strip(chr(34)).strip() else text}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")


# -- commands ----------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command: what it does, its arguments and options, examples."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = ["`RUN` is a run directory, or the name of one in `runs/`."]
    for name, command in commands_of(group):
        about, examples = command_help(command.help or "")
        arguments = [item for item in command.params if isinstance(item, TyperArgument)]
        options = [item for item in command.params if isinstance(item, TyperOption) and not item.hidden]
        usage = [f"spotlight {name}", *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)]
        lines += ["", f"## `spotlight {name}`", "", about, "", "```text", " ".join(usage), "```"]
        rows = [(_metavar(item), item.help or "") for item in arguments]
        rows += [(", ".join(item.opts), f"{item.help}{_choices(item)}") for item in options]
        if rows:
            lines += [
                "",
                "| | |",
                "|---|---|",
                *(f"| `{_cell(left)}` | {_cell(right)} |" for left, right in rows),
            ]
        if examples:
            lines += ["", "```sh", *examples, "```"]
    return "\n".join(lines) + "\n"


def commands_of(group: TyperGroup) -> Iterator[tuple[str, typing.Any]]:
    """All commands with their full names, a group's before its parts."""
    for name, command in group.commands.items():
        yield name, command
        if isinstance(command, TyperGroup):
            yield from ((f"{name} {part}", each) for part, each in commands_of(command))


def command_help(text: str) -> tuple[str, list[str]]:
    """A command's description, and its examples."""
    plain = re.sub(r"\[/?(?:bold|dim)\]", "", inspect.cleandoc(text)).replace("\\[", "[")
    about, _, examples = re.sub(r"^Examples?:?", "\0", plain, flags=re.MULTILINE).partition("\0")
    return about.strip(), [line.strip() for line in examples.splitlines() if line.strip()]


def _metavar(argument: TyperArgument) -> str:
    return argument.metavar or (argument.name or "").upper()


def _choices(option: TyperOption) -> str:
    default = option.default
    if option.is_flag or not option.show_default or default in (None, ""):
        return ""
    return f" [default: {default.value if isinstance(default, Enum) else default}]"


def exclusions_page() -> str:
    """What keys require of each other, from the same rows that are checked."""
    sections = [found for name in RunConfig.model_fields for found in _all_sections(RunConfig, name)]
    rows = dict.fromkeys(row.row() for section in sections for row in section.requirements())
    return "\n".join(
        [
            "| key | must be | where | otherwise |",
            "|---|---|---|---|",
            *(f"| `{key}` | {' | '.join(map(_cell, rest))} |" for key, *rest in sorted(rows)),
        ]
    )


def _all_sections(section: type[BaseModel], name: str) -> Iterator[type[Section]]:
    for found in sections_of(section.model_fields[name].annotation):
        if issubclass(found, Section):
            yield found
        for inner in found.model_fields:
            yield from _all_sections(found, inner)


PARTS: Mapping[str, Callable[[], str]] = {
    "<!-- configuration keys -->": configuration_page,
    "<!-- exclusions -->": exclusions_page,
    "<!-- commands -->": commands_page,
}
"""What stands in for each marker of a page."""
