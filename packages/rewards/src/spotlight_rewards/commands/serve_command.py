"""``spotlight rewards serve``: rewards as an HTTP service."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback
from spotlight_rewards.commands.reward_argument import START_DEADLINE_S, DeadlineOption, reward_of
from spotlight_rewards.commands.serving import HostOption, TokenEnvOption, token_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from spotlight_rewards.pool.reward_pool import RewardPool
    from spotlight_rewards.reward_config import RewardConfig


def serve(
    reward: Annotated[list[str], typer.Option("--reward", help="As in rewards[].name; repeat for several.")],
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="REWARD.KEY=VALUE", help="A reward's parameter, in YAML."),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the service.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, help="Processes per reward.")] = 1,
    token_env: TokenEnvOption = "",
    deadline_s: DeadlineOption = 60.0,
) -> None:
    """Serve rewards over HTTP, for other machines: each in its own processes, with deadlines.

    Speaks the JSON of UniRL's reward service; the reward [bold]http[/bold] is its client. Needs
    pip install 'spotlight-rewards\\[serve]'.

    [bold]Examples[/bold]

      spotlight rewards serve --reward ocr

      spotlight rewards serve --reward pickscore --reward geneval -p geneval.detector=weights/geneval

      REWARD_TOKEN=... spotlight rewards serve --reward hps --host 0.0.0.0 --token-env REWARD_TOKEN
    """
    console = TextConsole()
    with errors_without_traceback(), ExitStack() as open_pools:
        from spotlight_rewards.reward import RewardSetupError

        try:
            import uvicorn

            from spotlight_rewards.service.guarded_connections import guarded
            from spotlight_rewards.service.score_service import ScoreService, service_app
        except ImportError as error:
            raise RewardSetupError(
                f"rewards serve: the package {error.name!r} is missing. Install it: "
                "pip install 'spotlight-rewards[serve]'"
            ) from error

        token = token_of(host, token_env)
        configs = [reward_of(name, params, deadline_s) for name, params in _by_reward(reward, param or [])]
        _require_distinct(configs)
        pools = _opened(configs, workers, open_pools)
        app: FastAPI = service_app(ScoreService(pools), token)
        console.print(f"{', '.join(pools)} at http://{host}:{port} (POST /score, GET /rewards, /metrics)")
        # uvicorn ends by the signal that it got: without this, the rewards' processes would not be ended.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        uvicorn.Server(guarded(app, host=host, port=port)).run()


def _opened(configs: Sequence[RewardConfig], workers: int, stack: ExitStack) -> dict[str, RewardPool]:
    """A pool per reward, checked, by curve; the stack closes them."""
    from spotlight_rewards.pool.reward_pool import RewardPool

    pools = {
        config.curve: stack.enter_context(RewardPool([config], workers, start_deadline_s=START_DEADLINE_S))
        for config in configs
    }
    for pool in pools.values():
        _require_servable(pool)
        pool.check([], [])
    return pools


def _require_distinct(configs: Sequence[RewardConfig]) -> None:
    from spotlight_rewards.reward import RewardSetupError

    by_curve: dict[str, str] = {}
    for config in configs:
        if (other := by_curve.setdefault(config.curve, config.name)) != config.name:
            raise RewardSetupError(
                f"--reward names {other} and {config.name}, which clients would both call "
                f"{config.curve!r}; expected different names. Rename a function, or serve them apart."
            )


def _require_servable(pool: RewardPool) -> None:
    from spotlight_rewards.reward import RewardSetupError

    if comparing := pool.compares_groups:
        raise RewardSetupError(
            f"--reward is {comparing[0]!r}, which compares the pictures of a group; expected one that "
            "scores single pictures, because requests name no groups. Use it in the run itself."
        )
    if reading := pool.reads_files:
        raise RewardSetupError(
            f"--reward is {reading[0]!r}, which opens the files that metadata names; expected one that does "
            "not, because clients could name any file of this machine. Use it in the run itself."
        )


def _by_reward(names: list[str], params: list[str]) -> list[tuple[str, list[str]]]:
    from spotlight_rewards.reward import RewardSetupError

    if len(set(names)) < len(names):
        raise RewardSetupError(f"--reward names {', '.join(names)}; expected each once.")
    found: dict[str, list[str]] = {name: [] for name in names}
    for each in params:
        owners = [name for name in names if each.startswith(f"{name}.")]
        if not owners:
            raise RewardSetupError(
                f"--param is {each!r}; expected it to begin with a served reward and a dot: "
                f"{', '.join(f'{name}.KEY=VALUE' for name in names)}."
            )
        owner = max(owners, key=len)
        found[owner].append(each.removeprefix(f"{owner}."))
    return list(found.items())
