"""``spotlight rewards``: list the registered rewards, check or serve them, convert weights for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.any_terminal import AnyTerminal
from spotlight_rewards.commands.exit_codes import EXIT_STOPPED_BY_ERROR, errors_without_traceback
from spotlight_rewards.commands.options import silence_loading_bars
from spotlight_rewards.commands.reward_argument import (
    START_DEADLINE_S,
    DeadlineOption,
    ParamOption,
    reward_of,
)
from spotlight_rewards.commands.serve_command import serve

if TYPE_CHECKING:
    from spotlight_rewards.reward_config import RewardConfig
    from spotlight_rewards.reward_facts import RewardFacts

rewards_app = typer.Typer(cls=AnyTerminal, invoke_without_command=True)


@rewards_app.callback()
def rewards(context: typer.Context) -> None:
    """List the registered rewards, with what they score with, typical scores and parameters.

    A reward of your own is named [bold]module:function[/bold]: any function
    (images, prompts, metadata, **params) that returns one number per image.

    [bold]Examples[/bold]

      spotlight rewards

      spotlight train 'rewards=\\[{name: jpeg_size}]'

      spotlight train 'rewards=\\[{name: "my_rewards:brightness"}]'

      spotlight rewards check pickscore

      spotlight rewards serve --reward ocr

      spotlight rewards convert-geneval CHECKPOINT.pth OUT
    """
    if context.invoked_subcommand is None:
        list_rewards()


def list_rewards() -> None:
    """List the registered rewards, with what they score with, typical scores and parameters."""
    console = TextConsole()
    table = Table(box=None, pad_edge=False)
    for title in ("name", "runs on", "typical", "what it scores, with what"):
        table.add_column(title, overflow="fold")
    for each in registered_rewards():
        lines = [each.scores, *([f"weights: {each.weights} ({each.licence})"] if each.weights else [])]
        lines += [f"params: {each.params}"] if each.params else []
        table.add_row(each.name, each.runs_on, each.typical, "\n".join(lines))
    console.print(table)
    console.print("\nYour own: module:function, from the current directory or a package.")


def convert_geneval(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="OpenMMLab's .pth file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the converted detector.")],
) -> None:
    """Convert GenEval's own detector (OpenMMLab's Mask2Former, Swin-S) to transformers, without mmdet.

    [bold]Example[/bold]

      spotlight rewards convert-geneval CHECKPOINT.pth weights/geneval
    """
    silence_loading_bars()
    with errors_without_traceback():
        from spotlight_rewards.reward_registry import missing_packages_named

        with missing_packages_named("geneval"):
            from spotlight_rewards.geneval.openmmlab import convert_checkpoint

            origin, tensors = convert_checkpoint(checkpoint, out)
    console = TextConsole()
    console.print(f"{origin}: {tensors} tensors converted, none missing, none left.", soft_wrap=True)
    console.print(f"Use it: rewards=[{{name: geneval, params: {{detector: {out}}}}}]", soft_wrap=True)


def check(
    reward: Annotated[str, typer.Argument(metavar="NAME", help="As in rewards[].name.")],
    param: ParamOption = None,
    deadline_s: DeadlineOption = 600.0,
) -> None:
    """Download or find what a reward needs, score a built-in picture, and compare with what is known.

    The known figure is exact where no trained weights are involved, else a range: no real weights were at
    hand when it was written down. A score must also repeat itself, and fall with a wrong prompt.

    Exit status: 0 as expected, 1 not, 2 the reward cannot be loaded.

    [bold]Examples[/bold]

      spotlight rewards check ocr

      spotlight rewards check geneval -p detector=weights/geneval

      spotlight rewards check vlm-judge -p 'endpoint={base_url: "http://127.0.0.1:8000/v1", model: my-vlm}'
    """
    console = TextConsole()
    with errors_without_traceback():
        from spotlight_rewards.registry import REWARDS
        from spotlight_rewards.reward_check import check_reward
        from spotlight_rewards.reward_registry import facts_of

        config = reward_of(reward, param, deadline_s)
        facts = facts_of(reward) if reward in REWARDS else None
        download = " What is not here yet is downloaded." if may_download(config, facts) else ""
        console.print(f"Loading {reward}.{download}")
        report = check_reward(config, facts, start_deadline_s=START_DEADLINE_S)
    if report.scored_by:
        console.print(f"scored by {report.scored_by}", soft_wrap=True)
    first_s, later_s = report.score_s
    console.print(f"loaded in {report.load_s:.1f} s; a picture in {first_s:.2f} s, then {later_s:.2f} s")
    for each in report.findings:
        word, style = ("ok", "green") if each.good else ("WRONG", "bold red")
        text = f" {each.what}: {each.found}, expected {each.expected}"
        console.print(Text.assemble((f"{word:5}", style), text), soft_wrap=True)
    if not report.exact:
        console.print("The exact figure is not known to this version: a range stands in.")
    if not report.good:
        raise typer.Exit(EXIT_STOPPED_BY_ERROR)


for _name, _command in (("serve", serve), ("convert-geneval", convert_geneval), ("check", check)):
    rewards_app.command(_name, no_args_is_help=True)(_command)


def may_download(reward: RewardConfig, facts: RewardFacts | None) -> bool:
    """Whether its weights come from the hub, and are not those of a server."""
    from_hub = facts is not None and any("/" in each for each in facts.weights)
    return "model" in reward.params or (from_hub and "endpoint" not in reward.params)


@dataclass(frozen=True, slots=True)
class RegisteredReward:
    """A line of the list, as text; empty where there is nothing to say."""

    name: str
    scores: str
    runs_on: str
    typical: str
    weights: str
    licence: str
    params: str


def registered_rewards() -> Iterator[RegisteredReward]:
    """All rewards: first sentence of documentation, facts, and parameters with their defaults."""
    import inspect

    from spotlight_rewards.registry import REWARDS, RegistryError
    from spotlight_rewards.reward_registry import facts_of, params_of

    for name in REWARDS:
        try:
            function, facts = REWARDS.load(name), facts_of(name)
        except RegistryError as error:  # one package's mistake does not hide the other rewards
            yield RegisteredReward(name, f"cannot be loaded: {error}", "", "", "", "", "")
            continue
        weights = () if facts is None else facts.weights
        typical = None if facts is None else facts.typical
        yield RegisteredReward(
            name=name,
            scores=(inspect.getdoc(function) or "").partition("\n")[0],
            runs_on="" if facts is None else facts.runs_on,
            typical="" if typical is None else f"{typical[0]:g} to {typical[1]:g}",
            weights=", ".join(weights),
            licence="" if facts is None else facts.licence,
            params=", ".join(
                # The weights' names are long, and shown already.
                each.name if each.default in (each.empty, *weights) else f"{each.name}={each.default!r}"
                for each in params_of(function)
            ),
        )
