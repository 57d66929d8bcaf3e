"""The commands over one real run of the tiny model: train it, look at it, use it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from main_job import Job
from PIL import Image
from safetensors.torch import load_file
from tests.unit.metadata_server import metadata
from typer.testing import CliRunner, Result

from spotlight.cli.main import app
from spotlight.cli.runs.generate import slug
from spotlight.data.datasets import Prompts, load_prompts
from spotlight.report.loading import loading_snippet
from spotlight.report.record import read_run
from spotlight.store.run_directory import RunPaths

NAME = "by-command"
TRACED = (
    ("rollout", "aten::scaled_dot_product_attention"),
    ("training", "autograd::engine::evaluate_function"),
)
processes = multiprocessing.get_context("forkserver")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def trained(job: Job) -> tuple[Path, str]:
    """A run that `spotlight train` made, and what it printed."""
    overrides = "iterations=2", "learner.micro_batch_size=2"
    result = invoke("train", "--plain", "--profile", "2", *job.arguments(NAME, *overrides))
    assert result.exit_code == 0, result.output
    return job.root / NAME, result.output


def test_train_ends_with_scores_cost_places_and_loading_lines(trained: tuple[Path, str]) -> None:
    run, output = trained
    assert "validation at iteration 0: graded" in output
    assert "iteration 2/2" in output
    assert "= 0.0 x its noise" in output or "x its noise of" in output
    assert "Samples 12 issued = 12 trained" in output
    record = read_run(run)
    assert record.example_prompt == load_prompts(record.config).test[0].text
    assert loading_snippet(record.config, (run / "lora").resolve(), prompt=record.example_prompt) in output
    assert (run / "card" / "README.md").is_file()


def test_the_log_of_the_attempt_holds_what_the_console_said(trained: tuple[Path, str]) -> None:
    run, output = trained
    log = RunPaths(run).attempt_log(1).read_text()
    said = [line.partition("] ")[2] for line in output.splitlines() if re.match(r"\[\d+:\d\d\] ", line)]
    assert len(said) > 4
    assert [line for line in said if f"INFO spotlight: {line}\n" not in log] == [
        "loading the model, the rewards and the prompts"
    ]
    assert log.endswith("finished\n")


def test_a_dry_run_says_where_the_run_goes_on(trained: tuple[Path, str], job: Job) -> None:
    micro = "learner.micro_batch_size=2"
    for changed, expected in (
        ([NAME, micro, "iterations=7"], f"resumes after iteration 2 of 7: {job.root}"),
        ([NAME, micro, "iterations=2"], "finished 2 iterations are trained"),
        (["never-begun"], "run begins"),
    ):
        output = invoke("train", "--dry-run", *job.arguments(*changed)).output
        # A table breaks a long path anywhere.
        assert "".join(expected.split()) in "".join(output.split()), output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("run_seed=5", "run_seed: 0 in the run, 5 now"),
        ("data.train=other.jsonl", "data.train: "),
        ("runs_dir=/proc", "expected a place where this user can make folders"),
        ("model.lora=/no/such/lora", "model.lora: cannot read a LoRA from /no/such/lora"),
        ("model.transformer=/no/such", "model.transformer: /no/such is neither a .safetensors file nor"),
        ("metrics.sinks={trackio: {colour: red}}", "metrics.sinks.trackio"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    trained: tuple[Path, str], job: Job, changed: str, message: str
) -> None:
    name = NAME if "run_seed" in changed else "never-begun"
    result = invoke("train", "--dry-run", *job.arguments(name, changed))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_other_prompts_are_refused_before_a_model_is_loaded(
    trained: tuple[Path, str], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    prompts = load_prompts(read_run(run).config)
    changed = Prompts(prompts.train[1:], prompts.test)
    monkeypatch.setattr("spotlight.runtime.preflight.load_prompts", lambda _: changed)
    result = invoke("train", *job.arguments(NAME, "iterations=9", "learner.micro_batch_size=2"))
    assert "holds other prompts than up to the checkpoint" in " ".join(result.stderr.split())


def test_profile_writes_traces_of_so_many_steps(trained: tuple[Path, str]) -> None:
    run, output = trained
    for kind, inside in TRACED:
        path = run / "profile" / f"{kind}.json.gz"
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        names = Counter(event["name"].partition(": ")[0] for event in events if event.get("ph") == "X")
        assert names[f"{kind} step"] == 2
        assert names[inside] > 0
        assert f"trace of 2 {kind} steps: " in output


def test_the_printed_lines_make_a_picture_in_plain_diffusers(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = trained[1].splitlines()
    start = lines.index("from diffusers import QwenImagePipeline")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(lines[start : start + 4]), "the loading snippet", "exec"), {})
    assert Image.open(tmp_path / "picture.png").size == (16, 16)


def test_generate_draws_every_prompt_and_seed_before_and_after(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    arguments = ["-p", "a red circle", "-p", "a Blue/square!", "--seed", "3", "--count", "2", "--before"]
    result = invoke("generate", str(trained[0]), *arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    names = {f"{prompt}-seed{seed}" for prompt in ("a-red-circle", slug("a Blue/square!")) for seed in (3, 4)}
    expected = {f"{name}{side}.png" for name in names for side in ("", "-before")} | {"before-after.png"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert set(result.stdout.split()) == {str(tmp_path / name) for name in expected}
    picture = Image.open(tmp_path / "a-red-circle-seed3.png")
    assert picture.text["prompt"] == "a red circle"  # type: ignore[attr-defined]
    again = tmp_path / "again"
    assert (
        invoke(
            "generate", str(trained[0]), "-p", "a red circle", "--seed", "3", "--out", str(again)
        ).exit_code
        == 0
    )
    assert np.array_equal(
        np.asarray(picture), np.asarray(Image.open(again / picture.filename.split("/")[-1]))
    )  # type: ignore[attr-defined]


def test_generate_takes_a_file_of_prompts_and_a_size(trained: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    given = ["--prompts", str(tmp_path / "prompts.txt"), "--height", "24", "--out", str(tmp_path / "drawn")]
    assert invoke("generate", str(trained[0]), *given).exit_code == 0
    drawn = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in drawn] == ["a-blue-square-seed0.png", "a-red-circle-seed0.png"]
    assert {Image.open(path).size for path in drawn} == {(16, 24)}
    for wrong, said in ((["--height", "23", "-p", "x"], "rollout.height is 23"), ([], "--prompt: found []")):
        result = invoke("generate", str(trained[0]), *wrong)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())
    scored = invoke(
        "score", "jpeg_size", str(tmp_path / "drawn"), "--prompts", given[1], "--prompt", "a circle"
    )
    assert "expected one of the two" in " ".join(scored.stderr.split())
    one = ["--prompt", 'a sign: "OPEN"', "--sheet", str(tmp_path / "sheet.png"), "--json"]
    scored = invoke("score", "jpeg_size", str(tmp_path / "drawn"), *one)
    assert [each["prompt"] for each in json.loads(scored.stdout)["pictures"]] == ['a sign: "OPEN"'] * 2


def test_an_older_or_the_best_checkpoint_is_chosen(trained: tuple[Path, str], tmp_path: Path) -> None:
    run = str(trained[0])
    older = json.loads(invoke("eval", run, "--iteration", "1", "--json").stdout)
    newest = json.loads(invoke("eval", run, "--json").stdout)
    assert (older["iteration"], newest["iteration"]) == (1, 2)
    assert older["graded"] != newest["graded"]
    best = invoke("export", run, "--best", "--by", "jpeg_size", "--out", str(tmp_path))
    assert f"{tmp_path} (iteration 2, policy weights)" in best.stdout
    for given, said in (
        (["--iteration", "7"], "no checkpoint after iteration 7; expected one of those kept: 1, 2."),
        (["--best", "--iteration", "1"], "--best: found with --iteration 1"),
        (["--by", "graded"], "--by: found graded without --best"),
        (["--best", "--by", "nothing"], "has a validation of 'nothing'"),
    ):
        result = invoke("generate", run, "-p", "x", *given)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())


def test_eval_repeats_the_runs_last_validation(trained: tuple[Path, str]) -> None:
    result = invoke("eval", str(trained[0]), "--json")
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    last = read_run(trained[0]).validations[-1].scores
    assert scores["iteration"] == 2
    assert scores["graded"] == pytest.approx(last["graded"].mean, rel=1e-3)
    assert "jpeg_size" in invoke("eval", str(trained[0]), "--images", "1").output


def test_export_gives_a_lora_and_a_merged_pipeline(trained: tuple[Path, str], tmp_path: Path) -> None:
    lora = invoke("export", str(trained[0]), "--out", str(tmp_path / "lora"))
    assert lora.exit_code == 0, lora.output
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()
    for layout, key in (
        ("comfyui", "diffusion_model.transformer_blocks.0."),
        ("kohya", "lora_unet_transformer_blocks_0_"),
    ):
        named = invoke("export", str(trained[0]), "--format", layout, "--out", str(tmp_path / layout))
        assert named.exit_code == 0, named.output
        (file,) = (tmp_path / layout).glob("*.safetensors")
        assert str(file) in named.output
        assert any(name.startswith(key) for name in load_file(file))
    both = invoke("export", str(trained[0]), "--format", "kohya", "--merged")
    assert both.exit_code == 2
    assert "Leave one out" in both.stderr
    merged = invoke("export", str(trained[0]), "--merged", "--out", str(tmp_path / "merged"))
    assert merged.exit_code == 0, merged.output
    assert f"from_pretrained({str(tmp_path / 'merged')!r})" in merged.output
    again = invoke("export", str(trained[0]), "--merged", "--out", str(tmp_path / "merged"))
    assert again.exit_code == 2
    assert "not empty" in again.stderr
    half = invoke(
        "export", str(trained[0]), "--merged", "--dtype", "bfloat16", "--out", str(tmp_path / "half")
    )
    assert half.exit_code == 0, half.output
    assert re.search(
        r"bfloat16 loses [0-9.]+% of the trained update \(at most [0-9.]+%, of \S+\)", half.output
    )
    assert "--dtype float32 keeps all of it" in half.output
    assert "torch_dtype=torch.bfloat16" in half.output
    assert "of the trained update" not in merged.output, "float32 weights in float32 files"
    alone = invoke("export", str(trained[0]), "--dtype", "float32")
    assert alone.exit_code == 2
    assert "--dtype float32 without --merged" in " ".join(alone.stderr.split())


def test_audit_runs_and_card(trained: tuple[Path, str]) -> None:
    audit = invoke("audit", str(trained[0]))
    assert audit.exit_code == 0, audit.output
    report = json.loads(invoke("audit", str(trained[0]), "--json").stdout)
    assert report["violations"] == []
    assert report["counts"]["trained"] == 12
    assert NAME in invoke("runs", str(trained[0].parent)).output
    assert invoke("card", str(trained[0])).exit_code == 0


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("iso-8859-1", marks=pytest.mark.slow)])
def test_every_screen_is_for_any_terminal(
    trained: tuple[Path, str], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where `spotlight score` draws its page
    run, narrow = str(trained[0]), CliRunner(charset=encoding, env={"COLUMNS": "40"})
    own = job.arguments(f"on-{encoding}", "iterations=1", "learner.micro_batch_size=2")
    sweep = f"set: {{runs_dir: {tmp_path}}}\ngrid: {{run_seed: [0, 1]}}\n"
    (tmp_path / "rates.yaml").write_text(sweep, encoding="utf-8")
    (tmp_path / "trace.csv").write_text("0,add,a\n3600000,remove,a\n", encoding="utf-8")
    for words in (
        ["train", "--plain", *own],
        ["train", "--dry-run", *own],
        ["train", *own],  # it is finished
        ["runs", str(job.root)],
        ["runs", str(job.root), "--json"],
        ["compare", run],
        ["why", run],
        ["audit", run],
        ["eval", run],
        ["generate", run, "-p", "caf\u00e9 \u2013 \u7f8e", "--out", str(tmp_path / "pictures")],
        ["score", "jpeg_size", str(tmp_path / "pictures")],
        ["export", run, "--out", str(tmp_path / "lora")],
        ["card", run],
        ["report", run, "--html", str(tmp_path / "report.html")],
        ["config", *own],
        ["simulate", "paper-512", "run.iterations=2"],
        ["prices", "--source", "builtin"],
        ["sweep", str(tmp_path / "rates.yaml"), "--dry-run"],
        ["traces", str(tmp_path / "trace.csv")],
        ["rewards"],
        ["rewards", "check", "jpeg_size"],
        ["prompts", "ocr", str(tmp_path / "prompts"), "--count", "200"],
        ["--help"],
    ):
        shown = narrow.invoke(app, words)
        assert shown.exit_code == 0, (words, shown.output, shown.exception)
        assert shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slower_screens_are_for_any_terminal(trained: tuple[Path, str], tmp_path: Path) -> None:
    with metadata("aws") as cloud:
        for words, code in (
            (["plan", "paper-512", "--deadline-h", "6", "--starts", "1", "run.iterations=2"], 0),
            (["doctor", "--runs-dir", str(tmp_path)], 0),
            (["calibrate", str(trained[0])], 2),  # it was on no cluster
            (["notices", "--cloud", "aws", "--endpoint", cloud.url, "--once"], 0),
            (["tiny", "qwen-image", str(tmp_path / "tiny")], 0),
            (["dashboard", str(trained[0]), "--port", "0"], -signal.SIGTERM),
        ):
            command = [sys.executable, "-u", "-m", "spotlight.cli", *words]
            narrow = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
            with subprocess.Popen(
                command, env=narrow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="ascii"
            ) as process:
                assert process.stdout is not None
                said = process.stdout.readline()
                if words[0] == "dashboard":
                    process.terminate()
                said += process.stdout.read()
            assert process.returncode == code, (words, said)
            assert said.strip()
            assert "Traceback" not in said


def test_another_configuration_of_the_same_name_is_refused(trained: tuple[Path, str], job: Job) -> None:
    result = invoke("train", *job.arguments(NAME, "iterations=2", "run_seed=5"))
    assert result.exit_code == 2
    assert "run_seed: 0 in the run, 5 now" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_dry_run_ends_with_an_estimate_or_with_what_it_needs(trained: tuple[Path, str], job: Job) -> None:
    wanted = job.arguments(NAME, "learner.micro_batch_size=2", "iterations=9")
    assert "Estimate: needs three iterations of it" in invoke("train", "--dry-run", *wanted).output
    demo = "name=new", f"runs_dir={job.root}", "iterations=9"
    last = invoke("train", "--dry-run", *demo).output.splitlines()[-1]
    assert re.match(r"Estimate: \S+ \(\S+ to \S+\) of work, .* of 9 iterations. It rests on formulas: ", last)


def test_on_a_terminal_the_bars_are_live_and_sigint_stops_after_a_checkpoint(job: Job) -> None:
    arguments = job.arguments("on-a-terminal", "iterations=500", "evaluation.every=500")
    output, code = run_on_a_terminal(["train", *arguments], interrupt_at="1/500")
    assert code == 130, output
    assert "SIGINT" in output
    assert "Stopped; the same command resumes." in " ".join(output.split())
    assert list(RunPaths(job.root / "on-a-terminal").checkpoints.glob("*-iteration-*"))


def run_on_a_terminal(arguments: Sequence[str], interrupt_at: str) -> tuple[str, int]:
    """Run the command on a pseudo-terminal; send SIGINT once ``interrupt_at`` is on it."""
    mine, its = pty.openpty()
    process = processes.Process(target=work_on_a_terminal, args=(os.ttyname(its), arguments))
    process.start()
    assert process.pid is not None
    seen, interrupted = b"", False
    while process.is_alive() or select.select([mine], [], [], 0)[0]:
        if select.select([mine], [], [], 0.05)[0]:
            seen += os.read(mine, 65536)
        if not interrupted and interrupt_at.encode() in seen:
            os.kill(process.pid, signal.SIGINT)
            interrupted = True
    process.join()
    os.close(mine)
    os.close(its)
    assert process.exitcode is not None
    return seen.decode(errors="replace"), process.exitcode


def work_on_a_terminal(terminal: str, arguments: Sequence[str]) -> None:
    there = os.open(terminal, os.O_RDWR)
    os.dup2(there, 1)
    os.dup2(there, 2)
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "120"}
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    app(list(arguments), prog_name="spotlight")
