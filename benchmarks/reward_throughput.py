"""Pictures per second of each reward that runs on this machine, in one process through the reward pool.

    python -m benchmarks.reward_throughput
    python -m benchmarks.reward_throughput ocr geneval --side 1024 --json build/rewards.json

Rewards with weights score with small random models of the same classes, marked as stand-ins: their figures
tell what Spotlight adds (transfer, preprocessing, parsing), not what the real models cost. ``--real`` scores
with the real weights instead, and downloads them. Rewards that only ask servers are left out unless
``--params`` says where one is:

    spotlight rewards serve --reward jpeg_size --port 8080 &
    python -m benchmarks.reward_throughput http \\
        --params '{"http": {"server": {"base_url": "http://127.0.0.1:8080"}, "reward": "jpeg_size"}}'
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json import loads
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._measure import report
from spotlight_rewards.commands.options import silence_loading_bars
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.registry import REWARDS
from spotlight_rewards.results import RewardFailure
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError
from spotlight_rewards.reward_check import example_record
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_facts import Example
from spotlight_rewards.reward_registry import facts_of, tiny_params

_PLAIN = Example("sign", score=(0, 0), prompt="a white sign")
_CALLS = 3


@dataclass(frozen=True, slots=True)
class Throughput:
    """One reward's figures; seconds are medians of the calls after the first."""

    reward: str
    stand_in: bool
    batch: int
    side_px: int
    load_s: float
    first_call_s: float
    call_s: float
    pictures_per_s: float
    failed: int


def measure(name: str, side_px: int, batch: int, real: bool, given: Mapping[str, Any] | None) -> Throughput:
    """Score one batch several times. Raises RewardSetupError or RewardInputError: it cannot run here."""
    facts = facts_of(name)
    with tempfile.TemporaryDirectory() as folder:
        stand_in = None if real or given else tiny_params(name, Path(folder), {})
        params = given or stand_in
        if params is None and not real and facts is not None and facts.runs_on != "CPU":
            raise RewardSetupError("asks a server" if "server" in facts.runs_on else "has no stand-in")
        example = (facts and facts.example) or _PLAIN
        prompt, record = example.prompt, example_record(example, Path(folder))
        reward = RewardConfig(
            name=name, deadline_s=600, retries=0, batch_size=batch, params=dict(params or {})
        )
        moving = example.picture == "moving"
        images = [example_picture("moving")] * batch if moving else _pictures(side_px, batch)
        began_s = time.perf_counter()
        with RewardPool([reward], workers=1, start_deadline_s=600) as pool:
            pool.check([prompt], [record])
            load_s, calls_s, failed = time.perf_counter() - began_s, [], 0
            for _ in range(1 + _CALLS):
                began_s = time.perf_counter()
                found = pool.score(images, [prompt] * batch, [record] * batch).samples
                calls_s.append(time.perf_counter() - began_s)
                failed = sum(isinstance(each, RewardFailure) for each in found)
    later_s = sorted(calls_s[1:])[_CALLS // 2]
    return Throughput(
        name, bool(stand_in), batch, side_px, load_s, calls_s[0], later_s, batch / later_s, failed
    )


def _pictures(side_px: int, number: int) -> list[Image]:
    """Smooth random pictures: neither noise, which compresses badly, nor plain, which is quick to read."""
    from PIL import Image as PILImage

    rng = np.random.default_rng(0)
    return [
        np.asarray(
            PILImage.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side_px, side_px), 3)
        )
        for _ in range(number)
    ]


def main(
    rewards: Annotated[list[str] | None, typer.Argument(help="Registered rewards; default: all.")] = None,
    side: Annotated[int, typer.Option(min=16, help="Width and height of the pictures, in px.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Pictures in a call.")] = 16,
    real: Annotated[bool, typer.Option(help="Score with the real weights; downloads them.")] = False,
    params: Annotated[str, typer.Option(help="Parameters by reward, in JSON.")] = "{}",
    json: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
) -> None:
    """Measure, and print what was measured and left out."""
    silence_loading_bars()
    given: dict[str, dict[str, Any]] = loads(params)
    unknown = sorted({*(rewards or []), *given} - set(REWARDS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; expected among {', '.join(REWARDS)}")
    measured, left_out = [], []
    for name in rewards or REWARDS:
        try:
            measured.append(asdict(measure(name, side, batch, real, given.get(name))))
        except (RewardSetupError, RewardInputError) as error:
            left_out.append({"reward": name, "why": str(error)})
    report(json, "Rewards in one process", measured=measured, left_out=left_out)


if __name__ == "__main__":
    typer.run(main)
