"""The reports of a run, from a run directory written through the store: scores, cost, places, card."""

from __future__ import annotations

import ast
import io
import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from rich.console import Console
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.config.load import build_config, dump_config, load_dump
from spotlight.report.final_screen import print_final_screen
from spotlight.report.loading import loading_snippet
from spotlight.report.model_card import card_text, published_settings, without_places, write_card
from spotlight.report.record import RunRecord, ValidationChange, read_run
from spotlight.scheduler.records import (
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import (
    DropReason,
    Filler,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight.store.images import Tile, write_grid
from spotlight.store.ledger.course_changes import CourseChange
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight.store.metrics import Mean, MetricsRow, MetricsWriter
from spotlight.store.run_directory import RunDirectory, RunPaths
from spotlight.store.run_estimate import RunEstimate, Span, write_estimate
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import Prompt, PromptId

WORKER = WorkerId("rank-0")
CURVE = [(0, 0.487, 0.834), (1, 0.6, 0.88), (2, 0.781, 0.94)]
PROMPT = Prompt(PromptId("p"), "a red circle", {})


def records(iteration: int) -> list[Record]:
    version = PolicyVersion(iteration)
    made: list[Record] = [VersionPublished(version)] if iteration == 0 else []
    made += [PromptSeen(PROMPT)] if iteration == 0 else []
    ids = [RolloutId(f"t{iteration}-{member}") for member in range(4)]
    for member, name in enumerate(ids):
        made.append(
            RolloutIssued(Rollout(name, Purpose.TRAIN, iteration, PROMPT.id, member, member, 4, version))
        )
        made.append(SampleFinished(name, version, WORKER, 0))
    for name in ids[:3]:
        made.append(SampleScored(name, {"reward": 0.5}))
        made.append(SampleTrained(name, PolicyVersion(iteration + 1)))
    made.append(SampleDropped(ids[3], DropReason.REWARD_TIMEOUT, "60 s"))
    made.append(StepApplied(PolicyVersion(iteration + 1), iteration, 0, 3, 0.1, 0.2))
    made.append(VersionPublished(PolicyVersion(iteration + 1)))
    return made


def write_ledger(run: RunDirectory) -> None:
    """Two iterations in two attempts; the first died and lost five records."""
    with SqliteLedger(run.ledger) as ledger:
        for attempt in (1, 2):
            ledger.begin_attempt(pid=1, host="there", workers={WORKER: 0.05}, now_s=1000.0 * attempt)
            made = records(attempt - 1)
            start = ledger.position() + 1
            ledger.append(list(enumerate(made, start)))
            spent = {Phase.ROLLOUT: 60.0, Phase.TRAINING: 30.0}
            ledger.spend(
                [GpuSpend(WORKER, phase, s, 0.05) for phase, s in spent.items()], 1000.0 * attempt + 90
            )
            ledger.fill(attempt - 1, {Filler.TRAINING: 10.0, Filler.NEXT: 2.25})
        ledger.end_attempt(Ending.FINISHED, 2090.0)


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    config = build_config(
        {"name": "demo", "runs_dir": str(tmp_path), "iterations": 2, "fleet": {"price_usd_h": 0.05}}, "test"
    )
    with RunDirectory.open(tmp_path, "demo", dump_config(config)) as directory:
        write_ledger(directory)
        with MetricsWriter(directory, resume_at=0) as metrics:
            for iteration, strict, graded in CURVE:
                values = {
                    "validation/strict": strict,
                    "validation/strict_stderr": 0.02,
                    "validation/graded": graded,
                    "validation/graded_stderr": 0.006,
                    "validation/tag/counting": strict,
                    "validation/tag/counting_stderr": 0.03,
                }
                metrics.write(MetricsRow(iteration, 3 * iteration, 60.0 * iteration + 10, values))
                if iteration < 2:
                    row = {"train/loss": 0.1, "rollout/reward": 0.4, "seconds/rollout": 60.0}
                    row |= {"throughput/rollout_tokens_s": 1500.0, "throughput/rollout_tflop_s": 400.0}
                    row |= {"throughput/rollout_mfu": 0.4, "throughput/train_tokens_s": 700.0}
                    row |= {"throughput/train_timesteps_s": 2.5}
                    metrics.write(MetricsRow(iteration, 3 * iteration, 60.0 * iteration + 50, row))
                tile = Tile(np.full((32, 32, 3), 40 * iteration, np.uint8), PROMPT.text, strict)
                write_grid(directory, iteration, [tile], columns=1, title="a grid")
    (tmp_path / "demo" / "lora").mkdir()
    said = RunEstimate(2, 3, 0, Span(60, 100, 240), Span(0.001, 0.002, 0.004), "formulas: few")
    write_estimate(tmp_path / "demo" / "estimate.json", said)
    return read_run(tmp_path / "demo")


def screen_of(run: RunRecord, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_final_screen(console, run, run.paths.path / "card" / "README.md")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_margin_is_in_units_of_the_noise_of_the_difference() -> None:
    change = ValidationChange(Mean(0.5, 0.03), Mean(0.7, 0.04))
    assert change.noise == pytest.approx(0.05)
    assert change.margin_in_noise == pytest.approx(4.0)
    assert math.isnan(ValidationChange(Mean(0.5, 0.0), Mean(0.7, 0.0)).margin_in_noise)
    assert math.isnan(ValidationChange(Mean(0.5, math.inf), Mean(0.7, 0.1)).margin_in_noise)


def test_a_run_is_read_back_as_it_was_written(run: RunRecord) -> None:
    assert run.curves == ("strict", "graded")
    assert run.change("strict").margin == pytest.approx(0.781 - 0.487)
    assert [row.iteration for row in run.rows] == [0, 1]
    assert (run.history.iterations, run.history.interruptions, run.history.state) == (2, 1, "finished")
    assert run.wall_s == 130.0


def test_the_final_screen_says_what_was_gained_and_what_it_cost(run: RunRecord) -> None:
    words = " ".join(screen_of(run).split())
    for said in (
        "demo: 2 iterations, 6 samples trained, 2:10, $0.0025",
        "strict 0.487 ± 0.020 0.781 ± 0.020 +0.294 = 10.4 x its noise of 0.028",
        "graded 0.834 ± 0.006 0.940 ± 0.006",
        "rollout 120.0 s 67%",
        "180.0 worker seconds at $0.05 an hour: $0.0025",
        "Rollouts: 1,500 tokens/s, 400 TFLOP/s, MFU 40% on each device",
        "Training: 700 tokens/s, 2.5 picture-timesteps/s on each device",
        "Idle time filled by training beside rollouts 20.0 s, next iteration's rollouts 4.5 s",
        "Samples 8 issued = 6 trained + 2 dropped (reward_timeout)",
        "Survived 1 interruption in 2 attempts",
        f"LoRA {run.paths.path / 'lora'}",
        "model card",
    ):
        assert said in words


def test_the_estimate_stands_beside_what_the_run_took(run: RunRecord) -> None:
    said = "Estimated before: 1:40 (1:00 to 4:00), $0.002 ($0.001 to $0.004). The run took 2:10, $0.0025."
    assert f"{said} The estimate rested on formulas: few." in screen_of(run)
    changed = replace(run, estimate=replace(run.estimate, after=1))  # type: ignore[type-var]
    assert "Estimated after 1 iteration: " in screen_of(changed)
    assert "Estimated" not in screen_of(replace(run, estimate=None))
    listed = CliRunner().invoke(app, ["runs", str(run.paths.path.parent)], env={"COLUMNS": "150"})
    assert "1:40 $0.002" in listed.output
    (fields,) = json.loads(CliRunner().invoke(app, ["runs", str(run.paths.path.parent), "--json"]).output)
    assert fields["estimate"]["work_s"] == {"least": 60.0, "likely": 100.0, "most": 240.0}
    assert fields["corrected"] is None  # of two iterations


def test_the_final_screen_says_when_the_end_is_worse_than_the_best(run: RunRecord) -> None:
    assert "The end is worse" not in screen_of(run, 300)
    first, middle, last = run.validations
    for strict, kept, said in (
        (
            0.9,
            False,
            "strict 0.781 instead of 0.900, -0.119 = -4.2 x its noise of 0.028. Its checkpoint was not kept.",
        ),
        (0.9, True, f"noise of 0.028. spotlight export {run.paths.path} --best"),
        (0.79, True, ""),  # less than its noise
    ):
        if kept and not run.paths.checkpoints.joinpath("000001-iteration-000001").exists():
            (run.paths.checkpoints / "000001-iteration-000001").mkdir()
        better = replace(middle, scores={**middle.scores, "strict": Mean(strict, 0.02)})
        shown = screen_of(replace(run, validations=(first, better, last)), 300)
        assert ("The end is worse than iteration 1: " in shown) == bool(said)
        assert said in shown


def test_a_score_that_the_run_had_only_later_is_not_compared(run: RunRecord) -> None:
    rows = run.paths.metrics.read_text(encoding="utf-8").splitlines()
    first = {name: value for name, value in json.loads(rows[0]).items() if "strict" not in name}
    run.paths.metrics.write_text("\n".join([json.dumps(first), *rows[1:], ""]), encoding="utf-8")
    run = read_run(run.paths.path)
    assert run.curves == ("graded",)
    assert "0.834 ± 0.006" in screen_of(run, 300)
    assert "strict" not in write_card(run).read_text(encoding="utf-8").split("## Configuration")[0]


def test_no_place_is_told_whatever_it_is_called() -> None:
    code = "pipe.load_lora_weights(\"/home/o'brien/secret/lora\"); load('/home/x/secret/y')"
    assert without_places(code) == "pipe.load_lora_weights(\"PATH/TO/lora\"); load('PATH/TO/y')"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_loading_lines_survive_any_width_as_python(run: RunRecord, width: int) -> None:
    lines = screen_of(run, width).splitlines()
    start = lines.index("from diffusers import QwenImagePipeline")
    assert len(lines[start:]) >= 4
    program = "\n".join(lines[start : start + 4])
    assert program == loading_snippet(
        run.config, (run.paths.path / "lora").resolve(), prompt=run.example_prompt
    )
    ast.parse(program)
    assert f"prompt={run.example_prompt!r}" in program


def test_a_full_fine_tune_a_guided_and_a_bfloat16_model_load_as_they_must() -> None:
    full = build_config({"learner": {"mode": "full"}, "model": {"path": "A/B"}}, "test")
    assert "A/B" not in loading_snippet(full, Path("merged"))
    assert "load_lora_weights" not in loading_snippet(full, Path("merged"))
    large = {"path": "A/B", "revision": "v1", "dtype": "bfloat16"}
    guided = build_config({"model": large, "rollout": {"true_cfg_scale": 4.0}}, "test")
    snippet = loading_snippet(guided, Path("lora"))
    ast.parse(snippet)
    assert "from_pretrained('A/B', revision='v1', torch_dtype=torch.bfloat16)" in snippet
    assert "true_cfg_scale=4.0, negative_prompt=' '" in snippet


def test_a_model_given_by_a_relative_path_is_loaded_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe").mkdir()
    local = build_config({"model": {"path": "pipe"}}, "test")
    assert f"from_pretrained('{tmp_path / 'pipe'}')" in loading_snippet(local, Path("lora"))


def test_the_audit_tells_the_digest_in_one_line(run: RunRecord) -> None:
    result = CliRunner().invoke(app, ["audit", str(run.paths.path)])
    digests = [line.split()[1] for line in result.output.splitlines() if line.startswith("digest")]
    assert [len(digest) for digest in digests] == [64]


def test_the_audit_tells_what_filled_idle_time(run: RunRecord) -> None:
    result = CliRunner().invoke(app, ["audit", str(run.paths.path)])
    (line,) = [line for line in result.output.splitlines() if "idle time filled by" in line]
    assert line.split("filled by ", 1)[1] == "training beside rollouts 20.0, next iteration's rollouts 4.5"
    as_json = CliRunner().invoke(app, ["audit", str(run.paths.path), "--json"])
    assert json.loads(as_json.output)["filled_s"] == {"training": 20.0, "next": 4.5}


def test_the_card_is_a_folder_of_its_own_with_all_it_shows(run: RunRecord) -> None:
    course = (CourseChange(1, 7, "learner.learning_rate", 3e-4, 1e-4),)
    run = replace(run, history=replace(run.history, course=course))
    readme = write_card(run)
    text = readme.read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    assert matter["library_name"] == "diffusers"
    assert {"lora", "diffusion-nft", "qwen-image"} <= set(matter["tags"])
    assert "license" not in matter
    assert "base_model" not in matter  # the embedded model has no id on a hub
    results = ModelCard.load(readme).data.eval_results
    scores = {each.metric_type: each.metric_value for each in results}
    assert scores["strict"] == pytest.approx(0.781, abs=5e-4)
    shown = [line.split("(")[1][:-1] for line in text.splitlines() if line.startswith("![")]
    assert shown == ["before-after.png", "progress.png", "validation.svg", "reward.svg", "loss.svg"]
    for name in shown:
        content = (readme.parent / name).read_bytes()
        if name.endswith(".svg"):
            titles = [
                each.text for each in ElementTree.fromstring(content).iter() if each.tag.endswith("title")
            ]
            assert "learner.learning_rate 0.0003 to 0.0001" in titles
        else:
            assert content.startswith(b"\x89PNG")
    assert "| strict | 0.487 ± 0.020 | 0.781 ± 0.020 | +0.294 = 10.4 x its noise of 0.028 |" in text
    assert "| counting |" in text
    assert "`strict`: the share of pictures" in text
    assert "`graded`: the mean total reward" in text
    snippet = loading_snippet(run.config, (run.paths.path / "lora").resolve(), prompt=run.example_prompt)
    assert without_places(snippet) in text
    assert published_settings(run.config).rstrip() in text
    assert "Survived 1 interruption" in text


def test_the_card_of_a_full_fine_tune_says_how_it_is_used_where_a_bucket_keeps_it(run: RunRecord) -> None:
    config = build_config({"name": "demo", "learner": {"mode": "full"}}, "test")
    kept = replace(run, config=config, weights=None)
    assert "from_pretrained('PATH/TO/merged')" in card_text(kept, [], []).split("## Use")[1]
    begun = replace(kept, history=replace(run.history, attempts=()))
    assert "## Use" not in card_text(begun, [], []), "nothing is exported yet"


def test_the_card_shows_what_judges_that_were_not_trained_on_say(run: RunRecord) -> None:
    rewards = [{"name": "reader"}, {"name": "ocr", "weight": 0, "label": "judge"}]
    sections = {"rewards": rewards, "evaluation": {"strict": "reader/exact"}}
    config = build_config({"name": "demo", "iterations": 2, **sections}, "test")
    judged = [
        replace(row, scores={**row.scores, "judge": Mean(mean, 0.02), "judge/exact": Mean(mean / 2, 0.02)})
        for row, mean in zip(run.validations, (0.4, 0.5, 0.6), strict=True)
    ]
    judged_run = replace(run, config=config, validations=tuple(judged))
    text = card_text(judged_run, [], [])
    assert "| judge | 0.400 ± 0.020 | 0.600 ± 0.020 |" in text
    assert "| judge/exact | 0.200 ± 0.020 | 0.300 ± 0.020 |" in text
    fooled = "`judge` was not trained on: pictures that please only the reward may have fooled it."
    assert fooled in text
    assert "it refuses" not in text
    assert "not trained on" not in card_text(run, [], [])

    readings = {1: [(1, 0)], 2: [(1, 1), (1, 0.5), (1, 0), (0, 0)]}
    version = PolicyVersion(2)
    made: list[Record] = []
    for iteration, read in readings.items():
        for member, (reader, judge) in enumerate(read):
            name = RolloutId(f"e{iteration}-{member}")
            made.append(
                RolloutIssued(
                    Rollout(name, Purpose.EVAL, iteration, PROMPT.id, member, member, len(read), version)
                )
            )
            made.append(SampleFinished(name, version, WORKER, 0))
            made.append(SampleScored(name, {"reader/exact": reader, "judge/exact": judge}))
    with SqliteLedger(run.paths.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="there", workers={WORKER: 0.05}, now_s=3000.0)
        ledger.append(list(enumerate(made, ledger.position() + 1)))
    refused = (
        f"{fooled} Of the last 3 pictures with `reader/exact` = 1 it refuses 2 (`judge/exact` < 1), most of: "
    )
    assert f"{refused}a red circle (2)." in card_text(judged_run, [], [])


SECRETS = {
    "fleet.address": "10.1.2.3:6379",
    "fleet.notices.endpoint": "http://169.254.1.2/",
    "fleet.on_demand.start": "ssh admin@secret-host start",
    "fleet.target.params": {"namespace": "secret-namespace"},
    "metrics.sinks": {"tests.unit.sinks:Secret": {"server": "secret-server"}},
    "rewards.0.params": {"server": "http://secret-reward:8080"},
    "rewards.0.name": "/home/secret/rewards.py:prettiest",
    "runs_dir": "/home/secret/runs",
    "cache_dir": "/home/secret/cache",
    "data.train": "/home/secret/prompts.txt",
    "model.path": "/home/secret/base-model",
    "model.transformer": "/home/secret/transformer",
    "rollout.negative_prompt": "secret words",
}


def test_the_card_tells_no_address_command_place_or_parameter(run: RunRecord) -> None:
    """Whatever is said in a key: the card shows numbers and choices of the keys that it lists."""
    config = run.config
    for key, value in SECRETS.items():
        config = _set(config, key.split("."), Path(value) if key in ("runs_dir", "cache_dir") else value)
    config = _set(config, ["learner", "lora", "targets"], ("to_q",))
    text = write_card(replace(run, config=config)).read_text()
    assert "`prettiest`" in text
    assert "`base-model`" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["rewards"] == [{"name": "prettiest", "weight": 1.0}]
    assert settings["learner"]["lora"]["rank"] == config.learner.lora.rank
    assert settings["learner"]["lora"]["targets"] == ["to_q"]
    assert settings["algorithm"]["name"] == "diffusion-nft"
    assert not {"runs_dir", "cache_dir", "data", "fleet", "metrics", "policies"} & settings.keys()
    in_code, outside = text.split("```python")[1].split("```")[0], text.replace("secret words", "", 1)
    assert "secret" not in outside, "but for the negative prompt, which the code needs"
    assert "10.1.2.3" not in text
    assert "169.254" not in text
    assert str(run.paths.path) not in text
    assert "PATH/TO/base-model" in in_code


def _set(section: Any, key: list[str], value: object) -> Any:
    name, *below = key
    if isinstance(section, tuple):
        return (_set(section[int(name)], below, value), *section[1:])
    return section.model_copy(update={name: _set(getattr(section, name), below, value) if below else value})


def test_the_card_names_a_hub_model_as_its_base(run: RunRecord, tmp_path: Path) -> None:
    config = run.config.model_copy(
        update={"model": run.config.model.model_copy(update={"path": "Qwen/Qwen-Image"})}
    )
    text = write_card(replace(run, config=config)).read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    assert (matter["base_model"], matter["base_model_relation"]) == ("Qwen/Qwen-Image", "adapter")
    assert "Apache-2.0; commercial use: yes (read on " in text


def test_the_card_says_beside_which_base_scores_were_made(run: RunRecord) -> None:
    whole = write_card(run).read_text()
    model = run.config.model.model_copy(update={"quantize": "nf4"})
    text = write_card(replace(run, config=run.config.model_copy(update={"model": model}))).read_text()
    for said in ("held in NF4 for training and all scores", "`spotlight eval demo --quantize none`"):
        assert said in text
        assert said not in whole


def test_commands_read_the_run(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.paths.path.parent)
    runner = CliRunner()
    table = runner.invoke(app, ["runs", "."]).output
    assert "diffusion-nft" in runner.invoke(app, ["runs", "."], env={"COLUMNS": "100"}).output
    assert "demo" in table
    assert "2/2" in table
    run.paths.path.rename(long := run.paths.path.with_name("rates-learning_rate-0.0001-run_seed-0"))
    narrow = runner.invoke(app, ["runs", "."], env={"COLUMNS": "80"}).output
    assert "".join(line.split(" ")[0] for line in narrow.splitlines()[1:]) == long.name
    long.rename(run.paths.path)
    assert "finished" in table
    audit = runner.invoke(app, ["audit", "demo"])
    assert "6" in audit.output
    assert runner.invoke(app, ["audit", "demo", "--json"]).output.lstrip().startswith("{")
    card = runner.invoke(app, ["card", "demo"])
    assert card.exit_code == 0, card.output
    assert Path(card.output.strip()).is_file()


def test_violations_are_named_and_exit_1(run: RunRecord) -> None:
    result = CliRunner().invoke(app, ["audit", str(run.paths.path)])
    # Groups of 4 where the configuration says another size: the audit must notice.
    assert result.exit_code == 1
    assert "VIOLATED" in result.output


def test_runs_lists_the_unreadable_and_the_absent(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("nmae: odd\n")
    assert "unreadable" in CliRunner().invoke(app, ["runs", str(tmp_path)]).output
    assert "No runs in" in CliRunner().invoke(app, ["runs", str(tmp_path / "none")]).output


def test_what_a_run_recorded_is_read_without_the_packages_that_added_its_names(
    run: RunRecord, tmp_path: Path
) -> None:
    directory = tmp_path / "copies" / "demo"
    shutil.copytree(run.paths.path, directory)
    own = {
        "algorithm": {"name": "rwr", "temperature": 0.5, "train_samples": 3},
        "model": run.config.model.model_dump(mode="json") | {"family": "absent"},
        "metrics": {"sinks": {"lines": {"file": "rows"}}},
    }
    tree = run.config.model_dump(mode="json") | own
    RunPaths(directory).config.write_text(yaml.safe_dump(tree))
    found = read_run(directory).config
    assert (found.algorithm.name, found.algorithm.train_samples, found.model.family) == ("rwr", 3, "absent")
    assert "temperature: 0.5" in dump_config(found)
    listed = CliRunner().invoke(app, ["runs", str(directory.parent)]).output
    assert "2/2" in listed
    assert "unreadable" not in listed
    recounted = CliRunner().invoke(app, ["audit", str(directory)])
    assert recounted.exit_code == 1  # as in the test above
    assert "VIOLATED" in recounted.output
    with pytest.raises(ConfigError) as raised:
        load_dump(RunPaths(directory).config)
    for name in ("rwr", "absent", "lines"):
        assert f"Install the package that adds '{name}', or change the value." in str(raised.value)


def test_an_attempt_without_an_end_is_running_while_its_process_lives(tmp_path: Path) -> None:
    import os
    import socket
    import subprocess

    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid, state in ((os.getpid(), "running"), (dead.pid, "killed")):
        folder = tmp_path / str(pid)
        folder.mkdir()
        with SqliteLedger(folder / "ledger.sqlite") as ledger:
            ledger.begin_attempt(pid=pid, host=socket.gethostname(), workers={}, now_s=1.0)
        assert read_history(folder).state == state


def test_no_run_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run directory"):
        read_run(tmp_path)
