"""``spotlight simulate`` and ``spotlight plan``: the table, everything it rests on, pages and files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotlight.cli.main import app
from spotlight_plan.commands.simulate_command import print_table, wide_console
from spotlight_plan.pages.comparison_summary import TableLine
from spotlight_plan.pages.plan_page import COLUMNS
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.output_files import require_place, write_file
from spotlight_rewards.base.terminal import TextConsole

SMALL = (
    "workload.prompts=8",
    "workload.group_size=8",
    "workload.evaluation=null",
    "exploration.seeds_per_prompt=10",
    "exploration.steps=4",
    "run.iterations=5",
    "run.until_h=4",
    "run.starts=1",
    "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60, notice_lead_s: 20}",
    "plan={iterations: 3, strategies: [reserved_only, spotlight], gpu_types: [H100], "
    "reserved_nodes: [1, 2], spot_nodes: [2, 4]}",
    "iterations_to_target.spotlight={value: 8, source: 'assumed: for a test'}",
    "iterations_to_target.reserved_only.value=10",
    "cluster.reserved.usd_gpu_h=6.88",
    "cluster.spot.usd_gpu_h=1.78",
)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_simulating_writes_table_page_and_figures(tmp_path: Path) -> None:
    page, figures = tmp_path / "made" / "page.html", tmp_path / "made" / "figures.json"
    words = ("simulate", "paper-512", *SMALL, "--seed", "3", "--jobs", "1", "--html", str(page))
    result = call(*words, "--json", str(figures))
    assert result.exit_code == 0, result.output
    said = flat(result.output)
    for part in (
        "reserved_only all_on_demand spot_rollout_only critical_path spotlight",
        "time per iteration",
        "cost to target",
        "spot GPUs idle",
        "work lost",
        "exploration",
        "Iterations to target: an input, not a result",
        "fitted on a tiny DiT",
        "arXiv 2606.19004",
        "figures are assumed",
        "gpus.H100.batch_slope = 0.9: nearly bound by arithmetic",
        "seed 3",
    ):
        assert part in said
    content = json.loads(figures.read_text())
    assert [one["strategy"] for one in content["strategies"]] == content["scenario"]["strategies"]
    assert content["scenario"]["run"]["seed"] == 3
    assert content["prices"]["spot"]["usd_gpu_h"] == pytest.approx(1.78)
    assert content["prices"]["on demand"]["age_days"] > 0
    for one in content["strategies"]:
        assert one["target_h"] > 0
        assert sum(sum(by_phase.values()) for by_phase in one["gpu_s"].values()) > 0
    html = page.read_text()
    require_self_contained(html)
    assert html.index("times as fast as reserved_only") < html.index("time per iteration")
    for strategy in content["scenario"]["strategies"]:
        assert f"{strategy}: what every GPU did" in html
        assert f"{strategy}: iterations 2 to 4" in html
    assert "GPU-hours per iteration by phase" in html
    assert "Spot GPUs to be had" in html


def test_several_starts_are_simulated(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    only = ("--strategy", "reserved_only", "--jobs", "1", "--starts", "2", "--json", str(figures))
    result = call("simulate", "paper-512", *SMALL, *only)
    assert result.exit_code == 0, result.output
    for part in ("time to target, p50", "p90", "range", "the first of 2 starts", "seeds 0 to 1"):
        assert part in flat(result.output)
    (one,) = json.loads(figures.read_text())["strategies"]
    assert len(one["starts"]) == 2
    assert one["ranges"]["target_h"]["p50"] <= one["ranges"]["target_h"]["p90"]


def require_self_contained(html: str) -> None:
    """Nothing is fetched: no script, style, picture or frame from elsewhere."""
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import", own)
    assert not re.search(r"<script[^>]+src=", html)
    assert "Plotly.newPlot" in html
    assert len(html) > 1_000_000  # Plotly itself


def test_chosen_strategies_and_a_trace_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n600000,remove,a\n900000,add,c\n3600000,remove,c\n")
    words = [word for word in SMALL if not word.startswith("trace=")]
    result = call(
        "simulate", "paper-512", *words, "--trace", str(path), "--strategy", "spotlight", "--jobs", "1"
    )
    assert result.exit_code == 0, result.output
    said = flat(result.output)
    assert f"{path}, notices 30 s ahead" in said
    assert "all_on_demand" not in said
    assert "Spot nodes over the" in said


def test_a_narrow_terminal_cuts_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    columns, cells = ["", "reserved_only", "spotlight"], ("174.78-203.13", "0.376  37.4%")
    print_table(TextConsole(width=24), columns, [TableLine("cost per iteration", cells)])
    shown = "".join(capsys.readouterr().out.split())
    assert sorted(shown) == sorted("".join([*columns, "cost per iteration", *cells]).replace(" ", ""))


def test_a_pipe_gets_the_whole_table_on_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = (
        "8 learner H100 (1 x p5.48xlarge, aws) + 8 spot H100 (1 x p5.48xlarge, aws), all_spot+gap+tag+subset"
    )
    cells = (cluster, "2.53 h", "2.40-2.68 h", "$66.39", "$65.10-66.98", "77 s", "-")
    print_table(wide_console(), ["", *COLUMNS[1:]], [TableLine("*", cells)])
    assert flat(capsys.readouterr().out).endswith(" ".join(("*", *cells)))


def test_the_shipped_scenarios_are_listed() -> None:
    said = flat(call("simulate").output)
    for name in ("paper-512", "paper-1280", "video-1000", "HunyuanVideo"):
        assert name in said


def test_planning_recommends_and_draws_the_curve(tmp_path: Path) -> None:
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    fewer = (
        "iterations_to_target.spotlight={value: 3, source: 'assumed: for a test'}",
        "plan.spot_nodes=[2]",
        "plan.parts=[gap]",
    )
    words = ("plan", "paper-512", *SMALL, *fewer, "--jobs", "1", "--deadline-h", "1", "--html", str(page))
    result = call(*words, "--seed", "2", "--json", str(figures))
    assert result.exit_code == 0, result.output
    said = flat(result.output)
    assert re.search(
        r"Rent \d+ reserved.* H100, [\w+]+: \d+ iterations in [\d.]+ h for \$[\d.]+, simulated", said
    )
    assert "within a deadline of 1.00 h" in said
    (advice,) = (line for line in result.output.splitlines() if line.startswith("Simulate it: spotlight "))
    again = call(*shlex.split(advice)[3:], "--jobs", "1", "--json", str(tmp_path / "again.json"))
    assert again.exit_code == 0, again.output
    scenario = json.loads((tmp_path / "again.json").read_text())["scenario"]
    answer = json.loads(figures.read_text())["answer"]
    assert (scenario["run"]["seed"], scenario["workload"]["prompts"]) == (2, 8)
    assert scenario["cluster"]["reserved"]["nodes"] == answer["reserved_nodes"]
    assert scenario["cluster"]["spot"]["nodes"] in {answer["spot_nodes"], 4}  # 4: of reserved GPUs alone
    content = json.loads(figures.read_text())
    assert content["answer"]["simulated"]
    assert content["answer"]["outcome"]["target_h"] <= 1
    assert any(one["pareto"] for one in content["candidates"])
    assert content["verdict"].startswith("The planner's cluster")
    assert {"levers", "sensitivity"} <= set(content)
    html = page.read_text()
    require_self_contained(html)
    for part in ("Pareto front", "deadline", "Time and cost to target", "answer, simulated"):
        assert part in html


ALL_SPOT = (
    "strategies=[all_spot]",
    "cluster.reserved.nodes=0",
    "learner.gpus=4",
    "plan={iterations: 2, strategies: [all_spot], gpu_types: [H100], reserved_nodes: [2], spot_nodes: [2], "
    "parts: []}",
    "run.iterations=2",
    "trace.kind=always_on",
    "iterations_to_target.all_spot={value: 3, source: 'assumed: for a test'}",
)


def test_a_plan_without_reserved_nodes_is_explained(tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    words = ("plan", "paper-512", *SMALL, *ALL_SPOT, "--jobs", "1", "--deadline-h", "9")
    result = call(*words, "--json", str(figures), "--launch", str(tmp_path / "launch"))
    assert result.exit_code == 0, result.output
    assert "qwen-image-nft.yaml (--config) trains 300 iterations; the plan is for 3 " in flat(result.output)
    content = json.loads(figures.read_text())
    assert content["answer"]["strategy"] == "all_spot"
    first, *_, last = content["levers"]
    assert "cluster.reserved.nodes: found 0" in first["problem"]
    assert last["problem"] is None


def test_the_answer_is_printed_if_it_cannot_be_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConfigError("a scenario", [Problem("a.key", "a", "b", "c")])

    monkeypatch.setattr("spotlight_plan.explanation.plan_explanation.explain", broken)
    figures = tmp_path / "plan.json"
    result = call(
        "plan", "paper-512", *SMALL, *ALL_SPOT, "--jobs", "1", "--deadline-h", "9", "--json", str(figures)
    )
    assert result.exit_code == 1
    assert re.search(r"Rent \d+ learner .*, all_spot: \d+ iterations in", flat(result.output))


@pytest.mark.slow  # as test_simulate_plan.py finds it
def test_planning_says_when_nothing_meets_the_goal() -> None:
    result = call("plan", "paper-512", *SMALL, "--jobs", "1", "--budget-usd", "0.01")
    assert result.exit_code == 1
    said = flat(result.output)
    assert "Nothing meets a budget of $0.01. Nearest of" in said
    assert "plan.spot_nodes" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("simulate", "paper-51"), ("paper-51", "Did you mean 'paper-512'")),
        (("simulate", "run.seed=1"), ("SCENARIO", "before any key=value")),
        (("simulate", "paper-512", "--strategy", "magic"), ("--strategy", "'magic'", "spotlight")),
        (("simulate", "paper-512", "nonsense"), ("'nonsense'", "key.subkey=value")),
        (("simulate", "paper-512", "--trace", "gone.csv"), ("gone.csv", "expected a trace file")),
        (
            ("simulate", "paper-512", "cluster.reserved.nodes=0"),
            ("cluster.reserved.nodes", "rent at least one"),
        ),
        (("plan", "paper-512"), ("found neither", "exactly one, above 0", "--deadline-h 24")),
        (
            ("plan", "paper-512", "--deadline-h", "1", "--budget-usd", "2"),
            ("found 1.0 and 2.0", "exactly one"),
        ),
        (("plan", "paper-512", "--deadline-h", "-1"), ("exactly one, above 0",)),
        (("plan", "paper-512", "--deadline-h", "1", "--json", "/"), ("It is a folder: name a file in it",)),
        (
            ("plan", "paper-512", "--deadline-h", "1", "--launch", "/dev/null/here"),
            ("--launch: found /dev/null/here", "expected a folder"),
        ),
        (
            ("plan", "paper-512", "--deadline-h", "1", "--launch", "new", "--config", "absent.yaml"),
            ("--config: found absent.yaml", "the root of Spotlight's repository"),
        ),
        (
            ("plan", "paper-512", "--deadline-h", "5", "plan.gpu_types=[L4]"),
            ("no on-demand price of L4", "can be simulated"),
        ),
    ],
)
def test_wrong_calls_end_before_any_work(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in flat(result.output)


@pytest.mark.parametrize("command", [("simulate",), ("plan", "--deadline-h", "5")])
def test_without_plotly_the_extra_is_named_before_any_work(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    page = tmp_path / "page.html"
    result = call(command[0], "paper-512", *command[1:], "--html", str(page))
    assert result.exit_code == 2
    assert "pip install 'spotlight-rl[plots]'" in flat(result.output)
    assert not page.exists()


def test_a_page_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("simulate", "paper-512", *SMALL, "--strategy", "reserved_only", "--jobs", "1")
    result = call(*words, "--json", str(tmp_path / "file" / "out.json"))
    assert result.exit_code == 2
    assert "a place for it" in flat(result.output)
    assert "time per iteration" not in result.output


def test_output_files_are_replaced_whole_and_pipes_are_written_to(tmp_path: Path) -> None:
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_file(link, "old")
    with path.open() as reading:
        write_file(link, "new")
        assert reading.read() == "old"
    assert (path.read_text(), link.is_symlink()) == ("new", True)
    write_file(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
    assert {one.name for one in tmp_path.iterdir()} == {"out.json", "link.json"}


@pytest.mark.parametrize("place", [".", "out.json/below", "x" * 300])
def test_places_for_no_file_are_refused_before_any_work(place: str, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("kept")
    with pytest.raises(ConfigError, match="a place for it"):
        require_place(tmp_path / place)
    with pytest.raises(ConfigError, match="a place for it"):
        require_place(Path("/proc/out.json"))
    assert [one.read_text() for one in tmp_path.iterdir()] == ["kept"]
