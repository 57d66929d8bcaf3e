"""The documentation names only what exists: links, commands with their options, configuration keys."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from scripts import docs_site, families_table, reference_tables, rewards_table
from scripts.marked_part import read_part
from typer.core import TyperGroup, TyperOption

from spotlight.api.arguments import overrides_of
from spotlight.cli.main import app
from spotlight.config.load import build_config, dump_config, load_config
from spotlight.config.preset import with_preset
from spotlight.config.schema import RunConfig
from spotlight.runtime.resuming.course import marks
from spotlight_plan.scenarios.scenario_load import build_scenario, load_scenario, scenario_names
from spotlight_plan.sweep_file import grid_runs, sweep_of
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.strict_section import STATE
from spotlight_rewards.base.yaml_tree import merge, parse_yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HEADERS = [*sorted((ROOT / "examples").rglob("*.yaml")), *sorted((ROOT / "launch").iterdir())]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
OVERRIDE = re.compile(r"^[a-z_]+(\.[a-z_]+)*=\S")
PLACE = re.compile(r"^(FILE|run|my_run|qwen)(\.yaml)?$|^(RUN|demo)$")
"""Names that stand for a file, or a run, of the reader's."""

COMMANDS = typer.main.get_command(app)
assert isinstance(COMMANDS, TyperGroup)


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{by_name(page)} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor[1:] in anchors(path), f"{by_name(page)} links to {target}{anchor}"


def command_lines(page: Path) -> Iterator[list[str]]:
    """Every call of the program: in blocks of shell, and whole between backticks."""
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                yield from calls(line)
    for code in INLINE.findall(FENCE.sub("", text)):
        if code.startswith(("spotlight ", "torchrun ")):
            yield from calls(code)


def calls(line: str) -> Iterator[list[str]]:
    for part in re.split(r"&&|\||;", line):
        words = shlex.split(part, comments=True)
        if words[:1] == ["spotlight"]:
            yield words[1:]
        elif "spotlight.cli" in words:
            assert words[0] != "torchrun" or "--shutdown-timeout" in words, f"ranks have 30 s to stop: {line}"
            yield words[words.index("spotlight.cli") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_commands_options_and_overrides_exist(page: Path) -> None:
    for words in command_lines(page):
        if not words or words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS.commands, f"{by_name(page)}: spotlight {' '.join(words)}"
        require_options(words)
        if words[0] in {"simulate", "plan"}:
            require_scenario(page, words[1:])
        if words[0] in {"train", "config"}:
            require_configuration(page, written_out(words[1:]), whole=True)


@pytest.mark.parametrize("file", HEADERS, ids=by_name)
def test_commands_in_headers_exist(file: Path) -> None:
    for line in re.findall(r"^#   (spotlight .*)$", file.read_text(encoding="utf-8"), re.MULTILINE):
        for words in calls(line):
            require_options(words)
            if words[0] in {"train", "config"}:
                require_configuration(file, written_out(words[1:]), whole=True)


def written_out(words: Sequence[str]) -> list[str]:
    """Arguments without options, and with the overrides that some of them stand for."""
    words = list(words)
    if "--address" in words[:-1]:
        at = words.index("--address")
        words[at : at + 2] = ["fleet.driver=ray", f"fleet.address={words[at + 1]}"]
    for option, key in (("--deadline-h", "deadline_h"), ("--budget-usd", "budget_usd")):
        if option in words[:-1]:
            at = words.index(option)
            words[at : at + 2] = ["fleet.driver=ray", f"fleet.target.{key}={words[at + 1]}"]
    if "--ranks" in words[:-1]:
        at = words.index("--ranks")
        del words[at : at + 2]
    if "--like" in words[:-1]:
        at = words.index("--like")
        words[at : at + 2] = [f"like={words[at + 1]}"]
    return [word for word in words if not word.startswith("-")]


@pytest.mark.parametrize("page", [page for page in PAGES if "packages" not in page.parts], ids=by_name)
def test_what_samples_import_exists(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spotlight"):
                module = importlib.import_module(str(node.module))
                absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not absent, f"{by_name(page)}: {node.module} has no {', '.join(absent)}"


def require_options(words: Sequence[str]) -> None:
    command = COMMANDS.commands[words[0]]
    if isinstance(command, TyperGroup) and len(words) > 1:
        assert words[1] in command.commands, f"spotlight {' '.join(words)}"
        command = command.commands[words[1]]
    parameters = command.params
    known = {"-h", "--help"}.union(
        *(set(item.opts) | set(item.secondary_opts) for item in parameters if isinstance(item, TyperOption))
    )
    unknown = [word for word in words[1:] if word.startswith("-") and word not in known]
    assert not unknown, f"spotlight {words[0]} has no {unknown}"


def require_configuration(page: Path, arguments: Sequence[str], *, whole: bool) -> None:
    """The file exists (or stands for one), and the overrides load upon it.

    Args:
        whole: a command line as it stands, which must work unless the page shows its error.
    """
    files = [word for word in arguments if "=" not in word and "CONFIG" not in word and ">" not in word]
    overrides = [word for word in arguments if OVERRIDE.match(word)]
    path: Path | None = None
    if files and not PLACE.match(files[0]) and not files[0].startswith("my_run"):
        homes = (ROOT, ROOT / "examples" / "tutorial", page.parent)
        path = next((home / files[0] for home in homes if (home / files[0]).exists()), None)
        assert path is not None, f"{by_name(page)} names {files[0]}, which is not there"
    try:
        load_config(path, overrides)
    except ConfigError as error:
        # A key named on its own may contradict a default; so may a line whose error the page shows.
        wrong = [problem for problem in error.problems if "unknown key" in problem.found]
        text = page.read_text(encoding="utf-8")
        shown = "Error: " in text and all(problem.key in text for problem in error.problems)
        if wrong or (whole and not shown):
            raise AssertionError(f"{by_name(page)}: {' '.join(arguments)}") from error


def require_scenario(page: Path, arguments: Sequence[str]) -> None:
    """Shipped scenarios exist, and overrides name their keys."""
    names = [word for word in arguments if word in scenario_names()]
    for override in (word for word in arguments if OVERRIDE.match(word)):
        key = override.partition("=")[0]
        assert not unknown_scenario_key(override, *names), f"{by_name(page)} names {key}"


def unknown_scenario_key(override: str, name: str = "paper-512") -> bool:
    try:
        load_scenario(name, [override])
    except ConfigError as error:
        return any("unknown key" in problem.found for problem in error.problems)
    return False


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ("spotlight trian", "test_commands_options_and_overrides_exist"),
        ("spotlight audit demo --jsno", "test_commands_options_and_overrides_exist"),
        ("spotlight train rollout.stepz=8", "test_commands_options_and_overrides_exist"),
        ("spotlight simulate paper-512 prices.clod=aws", "test_commands_options_and_overrides_exist"),
        ("spotlight train examples/gone.yaml", "test_commands_options_and_overrides_exist"),
        ("rollout.stepz=8", "test_keys_and_values_between_backticks_exist"),
    ],
)
def test_the_checks_see_what_is_gone(
    wrong: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"Try `{wrong}`.\n")
    with pytest.raises(AssertionError):
        globals()[check](page)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_keys_and_values_between_backticks_exist(page: Path) -> None:
    for code in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if OVERRIDE.match(code) and "." in code.partition("=")[0] and unknown_scenario_key(code):
            require_configuration(page, [code], whole=False)


def scenario_tree(name: str) -> dict[str, object]:
    return load_scenario(name).model_dump(mode="json")


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_yaml_blocks_are_configurations(page: Path, tmp_path: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            tree = parse_yaml(block)
            assert isinstance(tree, dict)
            if "base" in tree:
                assert build_scenario(merge(scenario_tree(tree.pop("base")), tree), by_name(page)).name
                continue
            if tree.keys() & {"grid", "search"}:
                assert grid_runs(sweep_of({"name": "docs", **tree}, by_name(page)))
                continue
            if "stages" in tree:
                (tmp_path / "my_run.yaml").write_text(block)
                assert [load_config(tmp_path / "my_run.yaml", [f"stage={name}"]) for name in tree["stages"]]
                continue
            assert build_config(with_preset(tree), by_name(page))


def test_the_readme_counts_the_programs_that_the_page_shows() -> None:
    page = (ROOT / "docs" / "howto" / "coming-from.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## The same job in three programs")
    blocks = [block for _, block in FENCE.findall(section.partition("\n## ")[0])]
    lines = [sum(bool(line.strip()) for line in block.splitlines()) for block in blocks]
    trl, module, settings, ours = lines
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    counted = re.findall(r"^\| (?:TRL|Flow-Factory|Spotlight)\b[^|]*\| (\d+)", readme, re.MULTILINE)
    assert list(map(int, counted)) == [trl, module + settings, ours]
    keywords = {each.arg: ast.literal_eval(each.value) for each in ast.walk(ast.parse(blocks[-1]))
                if isinstance(each, ast.keyword) and each.arg in ("model", "rollout")}  # fmt: skip
    assert load_config(Path(os.devnull), list(overrides_of(keywords))).model.family == "sd3"


def test_the_tutorial_shows_its_example() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    reward = next(block for language, block in FENCE.findall(text) if language == "python")
    folder = ROOT / "examples" / "tutorial"
    assert reward in (folder / "to_the_left.py").read_text()
    (shown,) = (block for language, block in FENCE.findall(text) if language == "yaml")
    assert shown in (folder / "to_the_left.yaml").read_text()
    first_lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)[:2]
    assert "".join(first_lines) in text


def test_the_reference_names_every_key_and_every_option() -> None:
    """The build itself, with links and docstrings, is part of `make check`."""
    pages = "".join(
        (ROOT / "docs" / "reference" / name).read_text()
        for name in ("configuration.md", "exclusions.md", "cli.md")
    )
    assert all(marker in pages for marker in docs_site.PARTS)
    keys, commands = docs_site.configuration_page(), docs_site.commands_page()
    for line in dump_config(load_config(None)).splitlines():
        if key := re.match(r" *(?:- )?(\w+):", line):
            assert re.search(rf"[`.]{key[1]}`", keys), key[1]
    assert not re.search(r"\[/\w+\]|\| None|default: \]", commands), "markup, or an option without help"
    for name, command in COMMANDS.commands.items():
        assert f"## `spotlight {name}`" in commands
        for option in command.params:
            if isinstance(option, TyperOption) and not option.hidden:
                assert option.opts[0] in commands


def test_pictures_are_sound() -> None:
    for picture in (ROOT / "docs" / "img").glob("*.svg"):
        ElementTree.parse(picture)


def test_the_table_of_keys_that_a_resume_may_change_is_complete() -> None:
    text = (ROOT / "docs/howto/resume-and-audit.md").read_text()
    (table,) = re.findall(r"^\| who may change it \|.*\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", table)) == sorted(
        key for key, mark in marks(RunConfig()) if mark is not STATE
    )


def test_the_reference_lists_all_sections_and_commands_in_the_repository() -> None:
    for page, table in reference_tables.PAGES.items():
        shown = read_part(page, reference_tables.MARK)
        assert shown == table(), "run python -m scripts.reference_tables"


def test_the_table_of_families_is_the_registrys() -> None:
    shown = read_part(families_table.PAGE, families_table.FACTS)
    assert shown == families_table.facts(), "run python -m scripts.families_table"


def test_the_table_of_rewards_is_the_registrys() -> None:
    for page in (rewards_table.PAGE, rewards_table.README):
        shown = read_part(page, rewards_table.FACTS)
        assert shown == rewards_table.facts(), "run python -m scripts.rewards_table"
