"""Rows that train with the command ``spotlight train``, as a user does: whole runs, from files to a LoRA.

The recipes are those of ``examples/``, with fewer samples and a reward that needs no model.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.command import TrainCommand, audit, peak_memory, phases, trained_rows, training
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.suite import Outcome, Skip
from benchmarks.gpu.timing import peak_tflops
from benchmarks.gpu.whole_model import family_name, storage, whole_pipeline
from spotlight.cli.config_command import split_arguments
from spotlight.config.load import load_config
from spotlight.dry_run.memory_plan import peak_bytes
from spotlight.dry_run.run_plan import make_plan
from spotlight.scheduler.types import NodeKind
from spotlight.store.metrics import MetricsRow
from spotlight_fleet.emulated import guard
from spotlight_fleet.ray_names import SLOT
from spotlight_rewards.commands.exit_codes import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from spotlight_fleet.emulated.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, PROMPTS, GROUP = 3, 2, 4
TINY_ITERATIONS = 2
TARGET = 0.78
"""Strict score on held-out prompts; the testbed begins at .59."""
USD_H = {"cuda": 6.88, "cpu": 0.05}
"""Of the recipes' GPU, and of the default configuration's CPU."""
_WORK = (
    f"iterations={ITERATIONS}",
    "rewards=[{name: jpeg_size}]",
    "data={train: testbed, test: testbed}",
    "rollout.true_cfg_scale=1.0",
    f"rollout.prompts_per_iteration={PROMPTS}",
    f"rollout.group_size={GROUP}",
    f"rollout.batch_size={PROMPTS * GROUP}",
    "algorithm.advantage.std=global",
    "learner.lora={rank: 32, alpha: 64.0}",
    "evaluation={at_start: false, prompts: 2, images_per_prompt: 1, steps: 10, grid_prompts: 2}",
)
"""What all runs of the whole model change in their recipe: an iteration of some seconds."""
_STRICT = "validation/strict"
_TINY = (
    f"iterations={TINY_ITERATIONS}",
    "rollout.height=32",
    "rollout.width=32",
    "rollout.steps=4",
    "evaluation.steps=4",
)


# -- one process -------------------------------------------------------------------------------------------


def nft(lab: Lab) -> Outcome:
    """MFU of whole iterations of DiffusionNFT, the first left out."""
    return _one_process(lab, "nft", "qwen-image-nft.yaml", "algorithm.train_timesteps=2")


def grpo(lab: Lab) -> Outcome:
    """MFU of whole iterations of Flow-GRPO-Fast, the first left out."""
    fewer = ["rollout.sde_window={kind: random, size: 2, high: 3}"] if lab.tiny else []
    return _one_process(lab, "grpo", "qwen-image-ocr-lora.yaml", *fewer)


def _one_process(lab: Lab, name: str, recipe: str, *changes: str) -> Outcome:
    arguments = [*_arguments(lab, recipe), *changes]
    planned = peak_bytes(make_plan(load_config(*split_arguments(arguments))).memory)
    began = time.monotonic()
    with peak_memory(lab) as peak, training(_runs(lab), name, arguments) as command:
        command.finish()
        wall_s, rows, used = time.monotonic() - began, trained_rows(command), peak()
    seconds = [phases(row) for row in rows]
    for number, spent in enumerate(seconds):
        print(f"{name}, iteration {number}:", *(f"{k} {v:.2f} s " for k, v in spent.items()), flush=True)
    print(
        f"{name}: peak {used / 1e9:.1f} GB, planned {planned / 1e9:.1f} GB, {wall_s:.0f} s in all", flush=True
    )
    details = {
        "family": family_name(lab),
        "command_s": wall_s,
        "seconds": seconds,
        "rates": [{k: v for k, v in row.values.items() if k.startswith("throughput/")} for row in rows],
        "peak_gb": used / 1e9,
        "plan_gb": planned / 1e9,
    }
    unknown = math.nan if lab.device.type == "cuda" else 0.0
    return Outcome(_tflop_s(rows[1:], unknown) / peak_tflops(lab)[0], details)


def _arguments(lab: Lab, recipe: str) -> list[str]:
    """Of a run of the whole model: a recipe, and what is changed in it."""
    model = f"model.family={family_name(lab)}", f"model.path={whole_pipeline(lab)}"
    here = f"device={lab.device.type}", f"fleet.price_usd_h={USD_H[lab.device.type]}"
    return [str(ROOT / "examples" / recipe), *model, *here, *_WORK, *(_TINY if lab.tiny else ())]


def _runs(lab: Lab) -> Path:
    return storage(lab) / "runs"


def _tflop_s(rows: list[MetricsRow], unknown: float) -> float:
    """Over all seconds but those of evaluations and checkpoints, which are rare in a recipe.

    Args:
        unknown: the rate where none was counted.
    """
    done = spent = 0.0
    for row in rows:
        seconds = phases(row)
        for rate, phase in (("rollout", "rollout"), ("train", "training")):
            done += row.values.get(f"throughput/{rate}_tflop_s", unknown) * seconds[phase]
        spent += sum(s for phase, s in seconds.items() if phase not in ("evaluation", "checkpoint"))
    return done / spent


# -- two processes on one device ---------------------------------------------------------------------------


def replaced(lab: Lab) -> Outcome:
    """Seconds from SIGKILL to the only worker, beside a learner on its device, until another has its work.

    On a Ray cluster of this machine, two nodes with the same GPU. The run ends as if nothing had happened,
    and its audit is clean.
    """
    if importlib.util.find_spec("ray") is None:
        raise Skip("Ray is not installed")
    arguments = _arguments(lab, "qwen-image-nft.yaml")
    arguments += ["algorithm.train_timesteps=1", "learner.lora={rank: 4, alpha: 8.0}"]
    arguments += ["fleet.driver=ray", "fleet.notices.cloud=none"]
    arguments.append("learner.recompute=blocks")  # auto would take what the worker needs later
    with _two_nodes(lab) as cluster, peak_memory(lab) as peak:
        arguments.append(f"fleet.address={cluster.address}")
        with training(_runs(lab), "replaced", arguments) as command:
            killed_at = _kill_worker(command, cluster.id)
            command.finish()
            audit(command.run)
            wanted = PROMPTS * GROUP * (TINY_ITERATIONS if lab.tiny else ITERATIONS)
            found, seconds = (
                _after_the_kill(command, killed_at, wanted),
                [*map(phases, trained_rows(command))],
            )
    details = {**found, "family": family_name(lab), "seconds": seconds, "peak_gb": peak() / 1e9}
    return Outcome(float(str(found["at_work_again_s"])), details)


def _kill_worker(command: TrainCommand, cluster: str) -> float:
    """SIGKILL the worker as it works on the second iteration; returns when, in seconds since the epoch."""
    works = "SELECT 1 FROM leases JOIN rollouts ON id = rollout WHERE purpose = 'train' AND iteration = 1"
    command.wait_until(lambda: bool(command.ask(works)), "its second iteration")
    (worker,) = (
        pid
        for pid in guard.marked(f"{cluster}/")
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerActor")
    )
    os.kill(worker, signal.SIGKILL)
    return time.time()


def _after_the_kill(command: TrainCommand, killed_at: float, wanted: int) -> dict[str, object]:
    """What the ledger says. Raises RuntimeError if the worker was not replaced, or of the ``wanted`` samples
    some are missing.
    """
    crashes = command.ask("SELECT subject, detail FROM incidents WHERE kind = 'worker_crashed'")
    leases = command.ask(
        f"SELECT at, from_step FROM leases WHERE at > {killed_at!r} AND epoch > 0 ORDER BY at"
    )
    ((trained,),) = command.ask("SELECT COUNT(*) FROM outcomes WHERE kind = 'trained'")
    if not crashes or not leases or trained != wanted:
        raise RuntimeError(f"{trained} of {wanted} samples trained, crashes: {crashes}, leases: {leases}")
    at, step = leases[0]
    again_s = float(str(at)) - killed_at
    print(f"replaced: at work again after {again_s:.1f} s, from step {step}", flush=True)
    return {"at_work_again_s": again_s, "from_step": step, "crashes": crashes, "trained": trained}


@contextmanager
def _two_nodes(lab: Lab) -> Iterator[LocalCluster]:
    """A cluster on this machine: a reserved and a spot node of one slot each, which is the same GPU."""
    from spotlight_fleet.emulated.local_cluster import local_cluster

    resource = "GPU" if lab.device.type == "cuda" else SLOT
    with local_cluster(0) as cluster:
        for kind in (NodeKind.RESERVED, NodeKind.SPOT):
            cluster.add_node(f"{kind.value}-1", kind, 1, resource)
        yield cluster


# -- the testbed -------------------------------------------------------------------------------------------


def testbed(lab: Lab) -> Outcome:
    """Seconds until the default configuration reaches its target, everything included."""
    target, usd_h = 0.0 if lab.tiny else TARGET, USD_H[lab.device.type]
    arguments = [f"device={lab.device.type}", f"fleet.price_usd_h={usd_h}"]
    if lab.tiny:
        arguments += ["iterations=1", "rollout.prompts_per_iteration=2", "rollout.group_size=4"]
        arguments += ["evaluation.prompts=2", "evaluation.images_per_prompt=2", "learner.micro_batch_size=8"]

    def reached() -> list[MetricsRow]:
        return [row for row in command.rows() if row.iteration and row.values.get(_STRICT, -1.0) >= target]

    with training(_runs(lab), "testbed", arguments) as command:
        command.wait_until(lambda: bool(reached()), f"a strict score of {target:g}")
        command.stop()
        command.finish(EXIT_INTERRUPTED)
        row, rows = reached()[0], command.rows()
    usd = row.wall_s * usd_h / 3600
    print(f"testbed: {target:g} after {row.iteration} iterations, {row.wall_s:.1f} s, ${usd:.4f}", flush=True)
    details = {
        "iterations": row.iteration,
        "usd": usd,
        "usd_h": usd_h,
        "target": target,
        "strict": {each.iteration: each.values[_STRICT] for each in rows if _STRICT in each.values},
        "seconds": [phases(each) for each in rows],
        "cpu": on_cpu(target),
    }
    return Outcome(row.wall_s, details)


def on_cpu(target: float) -> dict[str, float]:
    """The same on a CPU: medians of the committed runs that reached the target."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8"))["runs"]
    seconds = []
    for name, run in runs.items():
        reached = [int(i) for i, strict in run["strict"].items() if int(i) and strict >= target]
        if name.startswith("counting/baseline/0.002/") and reached:
            seconds.append(sum(run["iteration_cpu_s"][: min(reached)]))
    median_s = statistics.median(seconds)
    return {"cpu_s": median_s, "usd": median_s * USD_H["cpu"] / 3600, "runs": len(seconds)}
