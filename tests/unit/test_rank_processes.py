"""How ranks on one machine are started, stopped and ended: real processes that tell what they met."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spotlight.cli.main import app

PARENT = """
import sys
from spotlight.cli.runs.rank_processes import run_ranks
sys.exit(run_ranks(3, [sys.executable, "-c", sys.argv[1], sys.argv[2]], follow_s=0.5))
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
rank, place = int(os.environ["RANK"]), Path(sys.argv[1])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}", flush=True)
def stop(number, frame):
    with (place / f"met-{rank}").open("a") as file:
        print(signal.Signals(number).name, file=file)
    (place / f"pid-{rank}").unlink()
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, stop)
(place / "new").mkdir(exist_ok=True)
file = place / "new" / f"pid-{rank}"
file.write_text(str(os.getpid()))
file.rename(place / f"pid-{rank}")
"""
WAIT = "\nwhile True: signal.pause()"


def start(place: Path, after: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD + after, str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "TMPDIR": str(place)},
    )


def wait_for_ranks(place: Path, process: subprocess.Popen[str]) -> list[int]:
    while len(found := sorted(place.glob("pid-*"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return [int(file.read_text()) for file in found]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have them ignored
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(tmp_path, WAIT)
    finally:
        signal.signal(signal.SIGHUP, former)
        signal.signal(signal.SIGINT, interrupt)
    wait_for_ranks(tmp_path, process)
    process.send_signal(number)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert [(tmp_path / f"met-{rank}").read_text() for rank in range(3)] == [f"{number.name}\n"] * 3
    assert printed == "rank 0 of 3 at 127.0.0.1\n"
    assert not list(tmp_path.glob("spotlight-ranks-*")), "logs of a run without an error"


def test_the_first_failure_ends_all_and_is_the_exit_status(tmp_path: Path) -> None:
    process = start(tmp_path, "\nif rank == 1: print('no such GPU'); sys.exit(7)" + WAIT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "rank 1 ended with status 7" in said
    assert "no such GPU" in said
    assert not list(tmp_path.glob("met-*")), "the others may end by themselves, and are killed then"
    (log,) = tmp_path.glob("spotlight-ranks-*/rank-1.log")
    assert "no such GPU" in log.read_text()


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    process = start(tmp_path, WAIT)
    pids = wait_for_ranks(tmp_path, process)
    os.kill(pids[2], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 2 ended by SIGKILL" in said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_that_end_well_end_the_command_well(tmp_path: Path) -> None:
    process = start(tmp_path, "")
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_ranks_of_a_killed_parent_are_told_to_stop(tmp_path: Path) -> None:
    process = start(tmp_path, WAIT)
    wait_for_ranks(tmp_path, process)
    process.kill()
    process.communicate(timeout=60)  # the pipes are closed when rank 0 has ended
    assert (tmp_path / "met-0").read_text() == "SIGTERM\n"


@pytest.mark.parametrize(
    ("arguments", "started", "message"),
    [
        (
            ["--ranks", "2", "fleet.driver=ray"],
            None,
            "--ranks is 2 with fleet.driver=ray; expected no --ranks",
        ),
        (["--ranks", "2", "--smoke"], None, "--smoke on 2 ranks; expected one process"),
        (["--smoke"], "3", "--smoke on 3 ranks; expected one process"),
        (["--ranks", "2"], "3", "--ranks is 2; expected 3, which torchrun has started"),
        (["--ranks", "5"], None, "Cannot use this configuration on 5 ranks"),
        (["--ranks", "5", "--dry-run"], None, "Cannot use this configuration on 5 ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_any_starts(
    arguments: list[str], started: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", started)
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_a_dry_run_is_of_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    place = f"runs_dir={tmp_path}"
    wide = ["train", "--dry-run", place, "algorithm.name=dgpo", "learner.micro_batch_size=8"]
    assert "Other numbers of --ranks may do" in " ".join(CliRunner().invoke(app, wide).output.split())
    two = CliRunner().invoke(app, [*wide, "--ranks", "2"])
    assert two.exit_code == 0, two.output
    assert "In one process" not in two.output
