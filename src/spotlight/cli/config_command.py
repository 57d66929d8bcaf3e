"""``spotlight config``: print the configuration with every key documented."""

from __future__ import annotations

import re
import shlex
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from spotlight_rewards.commands.exit_codes import errors_without_traceback

if typing.TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from spotlight.config.schema import RunConfig

_WIDTH = 100


def config(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG.yaml|RUN|KEY=VALUE", help="As for spotlight train."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", help="Start from another trainer's settings."),
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print only what differs from the defaults.")] = False,
) -> None:
    """Print a configuration as YAML with every key documented; without arguments, that of the demo.

    [bold]Examples[/bold]

      spotlight config > my_run.yaml

      spotlight config my_run.yaml --diff

      spotlight config /dev/null          [dim]# the defaults, without the demo's settings[/dim]

      spotlight config algorithm.name=flow-grpo rollout.sampler=cps

      spotlight config --like flow_grpo-sd3 --diff
    """
    from spotlight.cli.runs.train import configuration_of

    with errors_without_traceback():
        resolved = configuration_of([*(arguments or []), *([f"like={like}"] if like else [])])
        typer.echo(_differences(resolved) if diff else _printed(resolved), nl=False)


def _printed(config: RunConfig) -> str:
    """Its YAML; prompts that have to be set, and are not, are comments."""
    from spotlight.data.datasets import keys_to_set

    text = documented_yaml(config)
    for key in keys_to_set(config):
        name = key.rpartition(".")[2]
        text = re.sub(rf"^  {name}: .*$", f"  # {name}: FILE", text, count=1, flags=re.MULTILINE)
    return text


def _differences(config: RunConfig) -> str:
    """Overrides that give the configuration, each with the default, and what its preset does not set."""
    from spotlight.config.load import changed_keys
    from spotlight.config.preset import load_preset

    lines = [
        f"{shlex.quote(f'{key}={_scalar(value)}')}  # default: {_scalar(default)}"
        for key, (value, default) in changed_keys(config).items()
    ]
    if config.like is not None:
        preset = load_preset(config.like)
        lines += ["", f"# {preset.name}: {preset.source}", "# What differs from it:"]
        lines += [f"# - {sentence}" for sentence in preset.differs]
    return "\n".join(lines) + "\n"


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Split into the configuration file, if the first argument is one, and overrides.

    Raises:
        ConfigError: a later argument is not an override.
    """
    from spotlight_rewards.base.errors import ConfigError, Problem

    first = arguments[:1]
    path = Path(first[0]) if first and "=" not in first[0] else None
    overrides = arguments[1:] if path else arguments
    wrong = [argument for argument in overrides if "=" not in argument]
    if wrong:
        expected = "key=value (the one configuration file comes first)"
        problem = Problem("ARGUMENT", repr(wrong[0]), expected, "For example rollout.steps=8.")
        raise ConfigError("the command line", [problem])
    return path, overrides


def documented_yaml(section: BaseModel) -> str:
    """A configuration as YAML that loads as the same configuration, with each key's description above it."""
    return "\n".join(_lines(section, 0)).lstrip("\n") + "\n"


def _lines(section: BaseModel, indent: int) -> Iterator[str]:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        if indent == 0:
            yield ""
        yield from _comment(field, indent)
        yield from _entry(name, getattr(section, name), plain[name], indent)


def _entry(name: str, value: object, plain: object, indent: int) -> Iterator[str]:
    pad = " " * indent
    if _is_section(value):
        yield f"{pad}{name}:"
        yield from _lines(value, indent + 2)
    elif isinstance(value, tuple) and value and all(_is_section(item) for item in value):
        yield f"{pad}{name}:"
        for item in value:
            # Comments go before the first key of a list item, whose dash replaces two spaces of its line.
            lines = list(_lines(item, indent + 4))
            first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
            lines[first] = f"{pad}  - {lines[first].lstrip()}"
            yield from lines
    else:
        yield f"{pad}{name}: {_scalar(plain)}"


def _comment(field: FieldInfo, indent: int) -> Iterator[str]:
    pad = " " * indent
    text = " ".join((field.description or "").replace("``", "").split())
    choices = typing.get_args(field.annotation)
    if typing.get_origin(field.annotation) is typing.Literal and len(choices) > 1:
        text = f"{text} One of: {', '.join(map(str, choices))}."
    for line in textwrap.wrap(text, _WIDTH - indent):
        yield f"{pad}# {line}"


def _scalar(value: object) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _is_section(value: Any) -> typing.TypeGuard[BaseModel]:
    from pydantic import BaseModel

    return isinstance(value, BaseModel)
