"""A resumed run has the prompts and the scorers that it had before; where rewards run on this machine."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from store_history import history, write

from spotlight.config.load import dump_config, load_config
from spotlight.data.datasets import Prompts
from spotlight.runtime.assembly import components as build
from spotlight.runtime.attempt import RunResult, open_attempt
from spotlight.runtime.observer import Observer
from spotlight.runtime.run import train
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.metrics import MetricsRow
from spotlight.store.run_directory import RunDirectory
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts
from spotlight_rewards.reward import CODE, RewardInputError, RewardSetupError

NO_PROMPTS = Prompts((), ())


class Notes(Observer):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def prompts(*texts: str) -> Prompts:
    """To train on; one to test on."""
    return Prompts(
        tuple(parse_prompts("\n".join(texts), "train.txt")), tuple(parse_prompts("a cat", "test.txt"))
    )


def go_on(
    root: Path,
    scored_by: Mapping[str, str],
    *overrides: str,
    save: bool = False,
    given: Prompts = NO_PROMPTS,
) -> list[str]:
    """One attempt, which writes a history if there is none, and maybe a checkpoint. Returns its notes."""
    notes = Notes()
    config = load_config(None, [f"runs_dir={root}", "name=run", *overrides])
    with (
        RunDirectory.open(root, "run", dump_config(config)) as directory,
        open_attempt(
            config, directory, given, Ranks(), workers={}, began_s=time.time(), scored_by=scored_by,
            observer=notes, account=lambda recorder: None,
        ) as attempt,
    ):  # fmt: skip
        ledger = attempt.recorder.ledger
        if ledger.position() == 0:
            write(ledger, list(history(1, iterations=1)))
        if save:
            header = replace(attempt.recorder.header, iteration=1, ledger_position=ledger.position())
            with attempt.recorder.checkpoints.writer(header) as folder:
                (folder / "state").write_text("state")
            # The evaluation that follows the checkpoint.
            attempt.recorder.metrics.write(MetricsRow(1, 1, 1.0, {"validation/graded": 0.9}))
            (directory.images / "iteration-000001.png").touch()
        attempt.result = RunResult(directory.path, stopped=True)
    return notes.texts


def contents(root: Path) -> dict[Path, bytes]:
    """Files below a folder, but for SQLite's."""
    return {
        path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "sqlite" not in path.name
    }


def test_a_run_resumed_with_another_scorer_is_refused_and_goes_on_with_the_first(tmp_path: Path) -> None:
    first = {"geneval": "detector a", "ocr": "reader"}
    go_on(tmp_path, first, save=True)
    for other, found in (
        ({**first, "geneval": "detector b"}, "by 'detector b'"),
        ({"ocr": "reader"}, "by what it does not say"),
    ):
        said = f"reward 'geneval' was scored by 'detector a' up to the checkpoint, and would now be {found};"
        before = contents(tmp_path)
        with pytest.raises(RewardSetupError, match=f"{re.escape(said)} .*Put back the weights"):
            go_on(tmp_path, other)
        assert contents(tmp_path) == before
    go_on(tmp_path, {**first, "new": "named since"})
    report = audit(tmp_path / "run", AuditLimits())
    assert report.scorers == {"geneval": ("detector a",), "ocr": ("reader",), "new": ("named since",)}


def test_another_scorer_may_score_where_no_score_of_the_first_is_kept(tmp_path: Path) -> None:
    go_on(tmp_path, {"geneval": "detector a"})  # no checkpoint: all is undone
    go_on(tmp_path, {"geneval": "detector b"}, save=True)
    with pytest.raises(RewardSetupError, match="was scored by 'detector b'"):
        go_on(tmp_path, {"geneval": "detector a"})


def test_a_run_goes_on_with_other_code_of_a_reward_and_says_so(tmp_path: Path) -> None:
    first, other = ({"mine": f"{CODE}mine.py@{digest}"} for digest in ("1f", "2e"))
    go_on(tmp_path, first, save=True)
    *_, note = go_on(tmp_path, other, save=True)
    assert "the code of reward 'mine' changed" in note
    assert audit(tmp_path / "run", AuditLimits()).scorers == {"mine": (first["mine"], other["mine"])}


def test_a_run_resumed_with_other_prompts_is_refused_and_goes_on_with_the_first(tmp_path: Path) -> None:
    go_on(tmp_path, {}, given=prompts("to be replaced"))  # no checkpoint: all is undone
    first = prompts("a red circle", "two blue squares", "a star")
    go_on(tmp_path, {}, save=True, given=first)
    for texts, found in (
        (("a red circle", "a star", "a moon", "a sun"), r"2 added, 1 removed \(4 now\)"),
        (("a star", "a red circle", "two blue squares"), r"the same in another order \(3 now\)"),
    ):
        before = contents(tmp_path)
        said = rf"data\.train \(.*\) holds other prompts .*: {found}; expected the same 3\. Put back the file"
        with pytest.raises(PromptFileError, match=said):
            go_on(tmp_path, {}, given=prompts(*texts))
        assert contents(tmp_path) == before
    go_on(tmp_path, {}, given=first)
    assert audit(tmp_path / "run", AuditLimits()).violations == ()


def test_a_run_of_an_older_version_takes_the_prompts_that_it_is_resumed_with(tmp_path: Path) -> None:
    go_on(tmp_path, {}, save=True, given=prompts("a"))
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection:
        for later in ("prompt_files", "checkpoints", "course_changes"):
            connection.execute(f"DROP TABLE {later}")
        connection.execute("PRAGMA user_version = 11")
    go_on(tmp_path, {}, given=prompts("b"))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            "rewards=[{name: shapes, device: cuda, replicas: 99}]",
            ConfigError,
            r"rewards\[0\]\.device: found 'cuda' for 99 processes",
        ),
        ("rewards=[{name: 'spotlight_rewards.jpeg:jpeg_sice'}]", RewardSetupError, "has no 'jpeg_sice'"),
        ("rewards=[{name: jpeg_size, params: {gian: 2}}]", RewardSetupError, "unexpected params 'gian'"),
        ("rewards=[{name: ocr}]", RewardInputError, "quot"),
    ],
)
def test_mistakes_in_rewards_are_said_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr("spotlight.runtime.assembly.components.load_family", None)
    with pytest.raises(error, match=message):
        train(load_config(None, [f"runs_dir={tmp_path}", "device=cpu", settings]), Observer())


def test_under_torchrun_a_reward_finds_the_gpu_of_its_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    environments: dict[str, dict[str, str]] = {}
    directories = set[str]()

    def started(reward, deadline_s, replica, replicas, environment, directory):  # type: ignore[no-untyped-def]
        environments[reward.curve] = environment
        directories.add(directory)

    monkeypatch.setattr(build, "RewardProcess", started)
    rewards = "rewards=[{name: shapes}, {name: ocr, device: cpu}, {name: jpeg_size, device: cuda}]"
    config = load_config(None, [rewards])
    start = build.local_starter(config, Path("elsewhere/renamed"))
    for reward in config.rewards:
        start(reward, 1.0, 0, 1)
    assert {curve: each["CUDA_VISIBLE_DEVICES"] for curve, each in environments.items()} == {
        "shapes": "5", "ocr": "", "jpeg_size": "7",
    }  # fmt: skip
    assert directories == {str(Path.cwd() / "elsewhere" / "renamed")}
    build.local_starter(config)(config.rewards[0], 1.0, 0, 1)
    assert str(build.run_directory_of(config)) in directories


@pytest.mark.parametrize("comparing", ["vote", "vlm-rank"])
def test_a_single_picture_per_prompt_cannot_be_compared_and_nobody_is_asked_about_it(comparing: str) -> None:
    class Comparing:
        compares_groups, without_gradient = (comparing,), ()
        closed = False

        def close(self) -> None:
            self.closed = True

    pool = Comparing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "RewardPool", lambda *args, **settings: pool)
        config = load_config(None, ["evaluation.images_per_prompt=1", f"rewards=[{{name: {comparing}}}]"])
        if comparing == "vote":
            assert build.make_reward_pool(config) is not None
            return
        with pytest.raises(ConfigError, match=r"evaluation\.images_per_prompt.*at least 2"):
            build.make_reward_pool(config)
        assert pool.closed
        build.make_reward_pool(load_config(None, ["evaluation.images_per_prompt=2"]))
        unasked = ["evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false"]
        build.make_reward_pool(load_config(None, ["evaluation.images_per_prompt=1", *unasked]))
