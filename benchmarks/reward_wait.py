"""How much of an iteration waits for rewards: the demo's work with a reward that takes long per picture.

    python -m benchmarks.reward_wait
    python -m benchmarks.reward_wait --reward-ms 75 --replicas 8 --elsewhere
    python -m benchmarks.reward_wait fleet.driver=ray fleet.spot.nodes=2 --json build/reward_wait.json

By default the reward works for ``--reward-ms`` of one CPU per picture, as a neural reader does, on the same
cores as the rollouts; with ``--elsewhere`` it takes as long but leaves these cores alone, as on another
machine. Further arguments are configuration overrides. The first iteration, which warms up, is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._measure import report
from spotlight.cli.runs.train import driver_of
from spotlight.config.load import load_config
from spotlight.runtime.observer import Observer
from spotlight.store.metrics import read_metrics
from spotlight_rewards.reward import Image

DEMO = Path(__file__).parents[1] / "src/spotlight/config/demo.yaml"


def slow_reader(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    milliseconds: float,
    elsewhere: bool,
) -> list[float]:
    """The pictures' brightness, after so long per picture."""
    seconds = len(images) * milliseconds / 1e3
    if elsewhere:
        time.sleep(seconds)
    else:
        began_s = time.process_time()
        while time.process_time() - began_s < seconds:
            pass
    return [float(image.mean()) / 255 for image in images]


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.subkey=value ...")] = None,
    reward_ms: Annotated[float, typer.Option(min=0, help="Per picture and process.")] = 75.0,
    replicas: Annotated[int, typer.Option(min=1, help="Processes of the reward.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures in a call of the reward.")] = 2,
    elsewhere: Annotated[bool, typer.Option(help="Leave this machine's cores to the rollouts.")] = False,
    iterations: Annotated[int, typer.Option(min=2)] = 4,
    json: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
) -> None:
    """Train and print seconds of an iteration, of them waiting, and the share."""
    params = {"milliseconds": reward_ms, "elsewhere": elsewhere}
    reward = {"name": "benchmarks.reward_wait:slow_reader", "replicas": replicas, "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            DEMO,
            [
                f"runs_dir={folder}", f"iterations={iterations}", "evaluation.at_start=false",
                "evaluation.every=1000", "evaluation.at_end=false", "metrics.tensorboard=false",
                f"rewards={dumps([{**reward, 'params': params}])}", *(overrides or []),
            ],
        )  # fmt: skip
        driver_of(config)(config, Observer(), 0.0)
        first, *timed = [
            row for row in read_metrics(Path(folder) / config.name) if "rewards/wait_s" in row.values
        ]
    whole_s = timed[-1].wall_s - first.wall_s
    wait_s = sum(row.values["rewards/wait_s"] for row in timed)
    figures = {
        "iteration_s": whole_s / len(timed),
        "reward_wait_s": wait_s / len(timed),
        "share": wait_s / whole_s,
        "pictures": config.rollout.prompts_per_iteration * config.rollout.group_size,
        "reward_ms": reward_ms,
        "replicas": replicas,
    }
    report(json, "Waiting for rewards", rows=[figures])


if __name__ == "__main__":
    typer.run(main)
