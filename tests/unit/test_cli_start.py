"""The command starts light, and every command explains itself."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
from itertools import pairwise

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from rich.text import Text
from typer.core import TyperGroup
from typer.testing import CliRunner

from spotlight.cli.main import app, prepare_process
from spotlight.cli.runs.generate import slug

COMMANDS = (
    "train",
    "runs",
    "audit",
    "eval",
    "generate",
    "export",
    "card",
    "compare",
    "dashboard",
    "report",
    "why",
    "simulate",
    "plan",
    "prices",
    "traces",
    "notices",
    "config",
    "tiny",
    "rewards",
    "prompts",
    "score",
    "doctor",
    "version",
)
HEAVY = {"torch", "diffusers", "transformers", "peft", "scipy", "numpy", "huggingface_hub"}
CPU_S_MAX = 1.0


def run_python(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU OpenMP on Linux only")
@pytest.mark.parametrize(
    ("own", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")],
)
def test_threads_of_torch_wait_asleep_unless_the_environment_says_how(
    own: dict[str, str], found: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | own
    program = "from spotlight.cli.main import app; app(['version'], standalone_mode=False); import torch"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert f"GOMP_SPINCOUNT = '{found}'" in result.stderr  # as the library reads it


def test_transformers_does_not_say_of_every_processor_what_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare_process()
    log = logging.getLogger("transformers.utils.import_utils")
    log.warning("Qwen2VLImageProcessor requires torchvision, which is not installed")
    log.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


def test_processes_of_a_command_print_whatever_the_encoding() -> None:
    own_reward = "print('\\u00b1')"
    program = (
        "from spotlight.cli.main import app; app(['version'], standalone_mode=False); "
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own_reward!r}], check=True)"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, env=kept | ascii_only)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(b"?\n")


def cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_starts_in_well_under_a_second_and_without_torch() -> None:
    program = (
        "import sys\n"
        "from spotlight.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"
    )
    before = cpu_s_of_children()
    output = run_python(program)
    assert output.splitlines()[-1].split() == ["HEAVY"]
    assert cpu_s_of_children() - before < CPU_S_MAX


def test_the_help_names_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {command} " in output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_sentence_and_an_example(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"spotlight {command}" in result.output.split("Example")[1]
    about = [line.strip() for line in result.output.partition("Example")[0].splitlines()]
    for line, following in pairwise(about):
        if line and following and not following.startswith("Exit status:"):
            assert len(f" {line} {following.split()[0]} ") > 80, "a line ends before the terminal does"


def test_every_option_is_explained() -> None:
    import click
    from typer.main import get_command

    group = get_command(app)
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
        unexplained = [option.name for option in command.params if not getattr(option, "help", None)]
        assert unexplained in ([], ["help"]), f"spotlight {name}: {unexplained}"


def test_version_is_the_packages() -> None:
    import spotlight

    assert CliRunner().invoke(app, ["version"]).output.strip() == spotlight.__version__


def test_help_texts_lose_nothing_to_markup() -> None:
    groups = [typer.main.get_command(app)]
    for group in groups:
        assert isinstance(group, TyperGroup)
        for command in group.commands.values():
            groups += [command] if isinstance(command, TyperGroup) else []
            for parameter in command.params:
                text = getattr(parameter, "help", None) or ""
                assert Text.from_markup(text).plain == text, f"{command.name}: {parameter.name}"


@given(st.text(min_size=1), st.text(min_size=1))
@example("two cats", "Two cats!")
@example("two cats", "two-cats")
@example(
    "a sign, on a long road through the hills, that says one", "a sign, on a long road through the hills, no"
)
def test_pictures_of_different_prompts_have_different_names(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)
    assert re.fullmatch(r"[\w-]{1,57}", slug(one))
    assert slug("two cats") == "two-cats"
