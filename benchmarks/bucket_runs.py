"""What a bucket costs a run, and what it saves: heads that are killed with their disks.

    python -m benchmarks.bucket_runs --json build/bucket_runs.json

An S3 server (moto's, without a network's delays) on 127.0.0.1 holds the bucket. Runs of one seed:

- ``--rounds`` times one in a folder and one in the bucket, undisturbed, by turns which is first: what Linux
  counts of the thread that trains, on a core and blocked, and what a checkpoint takes;
- in the bucket, killed with SIGKILL ``--kills`` times, each time with all of its machine's disk. The next
  command finds an empty machine, waits for the lease of the dead one, and goes on.

A thread is on a core, waits for one, or is blocked: by a lock, such as the interpreter's, or a disk. What it
waits for a core depends on the machine's load, so it is left out; the rest tells what a bucket adds to an
iteration on a machine that has a core for it.

All must end with the same weights and the same ledger, and the audit reads the last from the bucket.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import boto3
import typer
from rich.console import Console
from rich.table import Table

from benchmarks._places import place_for_runs
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.manifest import sha256_of
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths

BUCKET = "spotlight-benchmark"
SETTINGS = (
    *("device=cpu", "rollout.height=16", "rollout.width=16", "rollout.steps=4", "evaluation.every=1000"),
    *("rollout.prompts_per_iteration=4", "rollout.group_size=8", "evaluation.prompts=4"),
    *("evaluation.at_start=false", "learner.micro_batch_size=16", "checkpoint.every=1"),
    "rewards=[{name: jpeg_size}]",
)
SAMPLED_EVERY_S = 0.002
CALLS = {"202": "futex (a lock)", "74": "fsync", "75": "fdatasync"}
"""By their numbers on x86-64."""
_SENT = re.compile(r"snapshot \d+: (\d+) bytes in (\d+) requests, ([\d.]+) s, of which ([\d.]+) s")
_ITERATION = re.compile(r"iteration (\d+)/")


@dataclass(frozen=True)
class Undisturbed:
    """A run: CPU seconds of its process, all threads, start and end included; of the thread that trains, what
    an iteration takes on a core, blocked, and waiting for a core, and in which system calls it was blocked,
    as sampled; and an iteration's median."""

    cpu_s: float
    on_core_s: float
    blocked_s: float
    for_a_core_s: float
    iteration_s: float
    blocked_in_s: dict[str, float]


@dataclass
class BucketReport:
    """Seconds, bytes and losses.

    Attributes:
        folder, bucket: of each round's run there.
        load: of the machine, over a minute, after each round.
        sent: bytes, requests, seconds and CPU seconds of each snapshot of the undisturbed runs.
        lease_s: what each restart waited for the lease of the killed head; ``brought_s`` after that until it
            went on, process start left out.
        lost: iterations that were trained when it was killed and were not what the next went on from.
    """

    folder: list[Undisturbed] = field(default_factory=list)
    bucket: list[Undisturbed] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    sent: list[tuple[int, int, float, float]] = field(default_factory=list)
    lease_s: list[float] = field(default_factory=list)
    brought_s: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    equal: bool = False
    audit: str = ""


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    kills: Annotated[int, typer.Option(min=0)] = 5,
    iterations: Annotated[int, typer.Option(min=6)] = 14,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Train in a folder, in a bucket, and in a bucket under kills of head and disk."""
    report = BucketReport()
    with place_for_runs(None, "spotlight-bucket-") as place, _server() as environment:
        address = f"s3://{BUCKET}/runs"
        outcomes = set()
        for number in range(rounds):
            places = (str(place / "runs"), report.folder), (address, report.bucket)
            for where, runs in places if number % 2 == 0 else reversed(places):
                run, undisturbed = _undisturbed(environment, place, where, iterations)
                runs.append(undisturbed)
                outcomes.add(_outcome(run))
                if where == address:
                    report.sent += _snapshots(run)
                    if number + 1 < rounds or kills:
                        _empty(environment)
                shutil.rmtree(run.parent)
            report.load.append(os.getloadavg()[0])
        if kills:
            outcomes.add(
                _outcome(_under_kills(environment, place / "killed", address, kills, iterations, report))
            )
        report.equal = len(outcomes) == 1
        audit = [sys.executable, "-m", "spotlight.cli", "audit", f"{address}/same"]
        done = subprocess.run(audit, env=environment, capture_output=True, encoding="utf-8")
        report.audit = done.stdout.splitlines()[-1] if done.stdout else done.stderr
    _show(report)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")


def _undisturbed(
    environment: dict[str, str], place: Path, where: str, iterations: int
) -> tuple[Path, Undisturbed]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen: dict[int, tuple[float, float, float]] = {}
    calls: dict[int, dict[str, float]] = {}
    watch: Watch | None = None
    for now_s, line, process in _training(environment, place / "kept", where, "same", iterations):
        if match := _ITERATION.search(line):
            watch = watch or Watch(process.pid)
            seen.setdefault(int(match[1]), (now_s, *_main_thread_s(process.pid)))
            calls.setdefault(int(match[1]), dict(watch.seconds))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = (_work(place / "kept") if "://" in where else Path(where)) / "same"
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    first, last = min(seen), max(seen)
    wall_s, on_core_s, for_a_core_s = (
        (end - begin) / (last - first) for begin, end in zip(seen[first], seen[last], strict=True)
    )
    blocked_s = wall_s - on_core_s - for_a_core_s
    blocked_in_s = {
        name: (seconds - calls[first].get(name, 0.0)) / (last - first)
        for name, seconds in calls[last].items()
    }
    return run, Undisturbed(cpu_s, on_core_s, blocked_s, for_a_core_s, _iteration_s(run), blocked_in_s)


class Watch:
    """Seconds that the first thread of a process is blocked in each system call, sampled until it ends."""

    def __init__(self, process: int) -> None:
        self.seconds: dict[str, float] = {}
        self._path = Path(f"/proc/{process}/task/{process}/syscall")
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        before_s = time.monotonic()
        while True:
            time.sleep(SAMPLED_EVERY_S)
            now_s = time.monotonic()
            try:
                number, *_ = self._path.read_text(encoding="ascii").split()
            except (OSError, ValueError):
                return
            if number != "running":  # nor waiting for a core
                name = CALLS.get(number, f"call {number}")
                self.seconds[name] = self.seconds.get(name, 0.0) + now_s - before_s
            before_s = now_s


def _main_thread_s(process: int) -> tuple[float, float]:
    """On a core, and waiting for one."""
    counted = Path(f"/proc/{process}/task/{process}/schedstat").read_text(encoding="ascii").split()
    return int(counted[0]) / 1e9, int(counted[1]) / 1e9


def _snapshots(run: Path) -> list[tuple[int, int, float, float]]:
    log = "".join(path.read_text(encoding="utf-8") for path in sorted((run / "attempts").glob("*.log")))
    return [(int(a), int(b), float(c), float(d)) for a, b, c, d in _SENT.findall(log)]


def _under_kills(
    environment: dict[str, str], cache: Path, address: str, kills: int, iterations: int, report: BucketReport
) -> Path:
    run, every, trained = _work(cache) / "same", max(1, iterations // (kills + 1)), 0
    for attempt in range(kills + 1):
        began_s, met_s, resumed = 0.0, 0.0, 0
        wanted = (attempt + 1) * every if attempt < kills else None
        for now_s, line, process in _training(environment, cache, address, "same", iterations):
            if "may still work here" in line:
                began_s = now_s
            elif "bringing" in line:
                met_s = now_s
                report.lease_s.append(now_s - began_s if began_s else 0.0)
            elif match := re.search(r"resuming after iteration (\d+)", line):
                report.brought_s.append(now_s - met_s)
                resumed = int(match[1])
            if wanted is not None and _trained(run) >= wanted:
                process.kill()
                break
        if attempt:
            report.lost.append(trained - resumed)
        if wanted is not None:
            trained = _trained(run)
            shutil.rmtree(cache)
    return run


def _trained(run: Path) -> int:
    rows = read_metrics(run) if RunPaths(run).metrics.exists() else []
    return max((row.iteration for row in rows if "train/loss" in row.values), default=0)


def _training(
    environment: dict[str, str], cache: Path, runs_dir: str, name: str, iterations: int
) -> Iterator[tuple[float, str, subprocess.Popen[str]]]:
    """Lines of a process that trains, as they come; it has ended when this is over."""
    arguments = (f"name={name}", f"runs_dir={runs_dir}", f"cache_dir={cache}", f"iterations={iterations}")
    command = [sys.executable, "-m", "spotlight.cli", "train", "--plain", *SETTINGS, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield time.monotonic(), line, process
        assert process.wait() in (0, -9), line


def _work(cache: Path) -> Path:
    return cache / "bucket" / "s3" / BUCKET / "runs" / "work"


def _iteration_s(run: Path) -> float:
    ends = [row.wall_s for row in read_metrics(run) if "train/loss" in row.values]
    return statistics.median(after - before for before, after in pairwise(ends))


def _outcome(run: Path) -> tuple[str, str]:
    newest = CheckpointStore(RunPaths(run).checkpoints, keep=2).newest_valid()
    assert newest is not None
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        files = sorted(path for path in (newest.directory / "learner").rglob("*") if path.is_file())
        return queries.digest(connection), " ".join(map(sha256_of, files))


@contextmanager
def _server() -> Iterator[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",  # the thread that trains does all of it
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        _client(environment).create_bucket(Bucket=BUCKET)  # tries until the server is there
        yield environment
    finally:
        process.kill()
        process.wait()


def _client(environment: dict[str, str]):  # type: ignore[no-untyped-def]  # boto3 has no types
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 12, "mode": "standard"}),
    )


def _empty(environment: dict[str, str]) -> None:
    client = _client(environment)
    while found := client.list_objects_v2(Bucket=BUCKET).get("Contents"):
        names = [{"Key": each["Key"]} for each in found]
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": names})


def _show(report: BucketReport) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    sent_bytes, requests, seconds, cpu_s = zip(*report.sent, strict=True)
    for where, runs in (("a folder", report.folder), ("the bucket", report.bucket)):
        table.add_row(f"CPU seconds of a run in {where}", _spread([each.cpu_s for each in runs]))
        for name, values in (
            ("seconds of an iteration", [each.iteration_s for each in runs]),
            ("  on a core, the thread that trains", [each.on_core_s for each in runs]),
            ("  blocked", [each.blocked_s for each in runs]),
            ("  waiting for a core", [each.for_a_core_s for each in runs]),
        ):
            table.add_row(f"{name}, {where}", _spread(values, 3))
        for call in sorted({call for each in runs for call in each.blocked_in_s}):
            values = [each.blocked_in_s.get(call, 0.0) for each in runs]
            table.add_row(f"    in {call}, {where}", _spread(values, 3))
    pairs = list(zip(report.bucket, report.folder, strict=True))
    for name, values in (
        ("on a core", [ours.on_core_s - theirs.on_core_s for ours, theirs in pairs]),
        ("blocked", [ours.blocked_s - theirs.blocked_s for ours, theirs in pairs]),
    ):
        table.add_row(f"an iteration in the bucket less one in the folder, {name}", _spread(values, 3))
    for name, value in (
        ("the machine's load", _spread(report.load)),
        ("snapshots", f"{len(report.sent)}"),
        ("bytes sent by one, median", f"{statistics.median(sent_bytes) / 2**20:.1f} MiB"),
        ("objects sent by one, median", f"{statistics.median(requests):.0f}"),
        (
            "seconds behind the run, median (largest)",
            f"{statistics.median(seconds):.2f}, {max(seconds):.2f}",
        ),
        ("  of it on a CPU", f"{statistics.median(cpu_s):.3f}, {max(cpu_s):.3f}"),
        ("kills of head and disk", f"{len(report.lost)}"),
        ("iterations trained again after it, for each", ", ".join(map(str, report.lost))),
        ("waiting for the dead head's lease", ", ".join(f"{each:.0f} s" for each in report.lease_s)),
        ("from then to going on", ", ".join(f"{each:.1f} s" for each in report.brought_s)),
        ("weights and ledger as undisturbed, to the bit", "yes" if report.equal else "NO"),
        ("audit of the bucket", report.audit),
    ):
        table.add_row(name, value)
    Console().print(table)


def _spread(values: list[float], digits: int = 2) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


if __name__ == "__main__":
    typer.run(main)
