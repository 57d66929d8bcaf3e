"""Launch files of a recommended cluster: SkyPilot tasks and a KubeRay job, from those of ``launch/``.

The repository's files are copied with the cluster, its prices and the settings of the strategy in their
places; all else (set-up, security, notices) stays as it is there. Pure, but for :func:`write_launch_files`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotlight.config.load import load_config
from spotlight.config.preset import with_preset
from spotlight.config.schema import RunConfig
from spotlight_plan.candidates import Candidate, Machine, shape_of
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.profile import load_profile
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import PipelinePart, strategy_named
from spotlight_plan.scenarios.strategy_scenario import ranks_of, timesteps_per_pass
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.output_files import require_folder, write_file
from spotlight_rewards.base.yaml_tree import merge, read_tree

_TEMPLATES = ("skypilot-reserved.yaml", "skypilot-spot.yaml", "kuberay-rayjob.yaml")
_INFRA = r"[a-z0-9]+(/[a-z0-9-]+){0,2}"
_HEAD_MACHINE = "cpus: 16+"
_RAY = ("fleet.driver=ray", "fleet.address=auto")
_PLACEHOLDERS = {
    "fleet.on_demand.start": "COMMAND_THAT_STARTS_A_NODE",
    "fleet.on_demand.stop": "COMMAND_THAT_STOPS_IT",
}
"""Of commands that only the user can know, where the run's configuration does not have them."""


@dataclass(frozen=True, slots=True)
class LaunchFiles:
    """What was written.

    Attributes:
        to_replace: placeholders in the files, which stand for what only the user can know.
        iterations: that the run they start trains.
    """

    paths: tuple[Path, ...]
    to_replace: tuple[str, ...]
    iterations: int


def launch_files(
    candidate: Candidate, templates: Mapping[str, str], config: str, settings: str
) -> dict[str, str]:
    """Contents by file name, with the commands that start them in ``start.sh``.

    Args:
        templates: those of :data:`_TEMPLATES`.
        config: of the training run, such as examples/qwen-image-nft.yaml.
        settings: what the run is given beside it, of :func:`launch_settings`.
    """
    moved = candidate.reserved_nodes if strategy_named(candidate.strategy).learner_moves else 0
    nodes = replace(
        candidate,
        reserved_nodes=candidate.reserved_nodes - moved,
        spot_nodes=candidate.spot_nodes + moved,
    )
    about = f"# {shape_of(candidate)}: written by spotlight plan.\n#\n"
    reserved = _sky_reserved(templates["skypilot-reserved.yaml"], nodes, config, settings)
    made = {
        "skypilot-reserved.yaml": reserved,
        "start.sh": _commands(nodes, candidate, placeholders_in(settings)),
    }
    if nodes.spot_nodes:
        made["skypilot-spot.yaml"] = _sky_others(templates["skypilot-spot.yaml"], nodes)
    if nodes.reserved_nodes > 1:
        made["skypilot-more.yaml"] = _sky_more(templates["skypilot-spot.yaml"], nodes)
    job = _kuberay(templates["kuberay-rayjob.yaml"], nodes, config, settings)
    made["kuberay-rayjob.yaml"] = job
    return {name: text if name == "start.sh" else about + text for name, text in made.items()}


def require_launch(folder: Path, file: ScenarioFile, config: str) -> None:
    """What can be known to be wrong before there is an answer.

    Raises:
        ConfigError: as :func:`write_launch_files`, if it is the same whatever the answer is; or the run is of
            another model, or has guidance where the scenario has none or none where it has.
    """
    read_templates()
    if not Path(config).is_file():
        remedy = "Run it in the root of Spotlight's repository, or name the run's own with --config."
        found, expected = f"{config}, which is no file in {Path.cwd()}", "the run's configuration"
        raise ConfigError("the command line", [Problem("--config", found, expected, remedy)])
    try:
        words = " ".join(workload_settings(file, _held_out(config))).split()
        load_config(Path(config), [*_RAY, "fleet.learner_ranks=1", *words])
    except ConfigError as error:
        # Those of the fleet are the answer's.
        if problems := [one for one in error.problems if not one.key.startswith("fleet.")]:
            raise ConfigError(error.source, problems) from None
    if problems := list(_other_work(file, _tree(config))):
        raise ConfigError(config, problems)
    _require_folder(folder)


def _tree(config: str) -> dict[str, Any]:
    """The run's configuration on top of the defaults."""
    return merge(RunConfig().model_dump(mode="json"), with_preset(read_tree(Path(config))))


def _other_work(file: ScenarioFile, run: Mapping[str, Any]) -> Iterator[Problem]:
    """What the run would do that the scenario does not, and that no setting of a launch changes."""
    profile, family = load_profile(file.workload.profile), run["model"]["family"]
    if profile.family not in (None, family):
        remedy = (
            "Name another with --config, or plan with the model's own profile (workload.profile; one without "
            "`family` fits any)."
        )
        expected = f"{profile.family!r}, the family of the plan's profile {file.workload.profile}"
        yield Problem("model.family", repr(family), expected, remedy)
    scale = run["rollout"]["true_cfg_scale"]
    if (scale > 1) is not file.workload.guidance:
        expected = "above 1" if file.workload.guidance else "1"
        remedy = f"Or plan with workload.guidance={str(scale > 1).lower()}."
        yield Problem(
            "rollout.true_cfg_scale",
            f"{scale:g}",
            f"{expected}, because the plan's workload.guidance is {str(file.workload.guidance).lower()}",
            remedy,
        )


def write_launch_files(
    folder: Path, file: ScenarioFile, candidate: Candidate, prepared: Prepared, config: str
) -> LaunchFiles:
    """Write them.

    Raises:
        ConfigError: the repository's files are not here, the run's configuration refuses the settings, or the
            folder cannot be written to.
    """
    settings = launch_settings(file, candidate, prepared, config)
    made = launch_files(candidate, read_templates(), config, settings)
    _require_folder(folder)
    for name, text in made.items():
        write_file(folder / name, text)
    paths = tuple(folder / name for name in made)
    return LaunchFiles(paths, placeholders_in(settings), _tree(config)["iterations"])


def _require_folder(folder: Path) -> None:
    try:
        require_folder(folder)
    except OSError as error:
        problem = Problem("--launch", f"{folder}: {error.strerror}", "a folder", "Name another.")
        raise ConfigError("the command line", [problem]) from None


def launch_settings(file: ScenarioFile, candidate: Candidate, prepared: Prepared, config: str) -> str:
    """What ``spotlight train`` is given beside ``config``: the workload, the cluster and the strategy.

    Commands for nodes on demand that ``config`` lacks are placeholders. Passes that need a limit of memory it
    lacks, beside a worker of the same GPU, are as simulated.

    Args:
        prepared: ``file`` with the candidate's cluster.

    Raises:
        ConfigError: ``config`` refuses them.
    """
    settings = [
        *workload_settings(file, _held_out(config)),
        *strategy_settings(candidate, prepared),
    ]
    words = " ".join(settings).split()
    try:
        load_config(Path(config), [*_RAY, *words])
    except ConfigError as error:
        missing = {one.key for one in error.problems}
        words += [f"{key}={text}" for key, text in _PLACEHOLDERS.items() if key in missing]
        if "learner.pass_memory_gib" in missing:
            strategy = strategy_named(candidate.strategy)
            per_pass = timesteps_per_pass(prepared, strategy, ranks_of(prepared, strategy))
            words += ["learner.recompute=blocks", f"learner.timesteps_per_pass={per_pass}"]
        load_config(Path(config), [*_RAY, *words])
    return " ".join(words)


def placeholders_in(settings: str) -> tuple[str, ...]:
    """Which stand in settings."""
    return tuple(text for text in _PLACEHOLDERS.values() if text in settings)


def _held_out(config: str) -> int | None:
    """Prompts in the run's held-out file, one a line; None: it cannot be read here, or only some are used.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    data = with_preset(read_tree(Path(config))).get("data")
    path = data.get("test") if isinstance(data, dict) and not data.get("tags") else None
    try:
        text = Path(str(path)).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError):
        return None
    return sum(bool(line.strip()) for line in text.splitlines()) or None


def read_templates() -> dict[str, str]:
    """The repository's launch files: of the current folder, else beside this source.

    Raises:
        ConfigError: there are none.
    """
    for root in (Path.cwd(), *Path(__file__).parents[4:5]):
        paths = {name: root / "launch" / name for name in _TEMPLATES}
        if all(path.is_file() for path in paths.values()):
            return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    remedy = "Run it in Spotlight's repository, from which SkyPilot installs Spotlight on the machines."
    found = f"no launch/{_TEMPLATES[0]} in {Path.cwd()}"
    raise ConfigError(
        "the command line", [Problem("--launch", found, "the repository's launch files", remedy)]
    )


def workload_settings(file: ScenarioFile, held_out: int | None = None) -> Iterator[str]:
    """Of the scenario, whatever the cluster and the strategy.

    Args:
        held_out: prompts that there are to evaluate. If they are fewer than the scenario's, each has as many
            more images. None: unknown, so the run's own numbers stay.
    """
    work, test = file.workload, file.workload.evaluation
    yield f"rollout.height={work.height} rollout.width={work.width} rollout.steps={work.steps}"
    yield f"rollout.prompts_per_iteration={work.prompts} rollout.group_size={work.group_size}"
    samples = "null" if work.train_samples is None else work.train_samples
    yield f"algorithm.train_timesteps={work.trained_timesteps} algorithm.train_samples={samples}"
    yield f"learner.micro_batch_size={work.micro_batch_per_gpu}"
    yield f"learner.updates_per_batch={work.updates_per_batch} learner.shard={file.learner.shard}"
    if test is None:
        yield "evaluation.every=0 evaluation.at_start=false evaluation.at_end=false"
        return
    yield f"evaluation.every={test.every} evaluation.at_start=true evaluation.at_end=true"
    yield f"evaluation.steps={test.steps}"
    if held_out is not None:
        prompts = min(test.prompts, held_out)
        images = -(-test.prompts * test.images_per_prompt // prompts)
        yield f"evaluation.prompts={prompts} evaluation.images_per_prompt={images}"


def strategy_settings(candidate: Candidate, prepared: Prepared) -> Iterator[str]:
    """Of the cluster and the strategy."""
    run, pricing, strategy = prepared.file, prepared.pricing, strategy_named(candidate.strategy)
    work, parts = run.workload, strategy.parts
    yield f"fleet.learner_ranks={candidate.reserved_nodes * candidate.reserved.gpus}"
    if strategy.learner_moves:
        yield f"fleet.learner_placement={strategy.placement}"
    yield f"checkpoint.every={1 if strategy.learner_moves else work.checkpoint_every}"
    if strategy.placement == "spot_then_on_demand":
        wish = run.learner.on_demand
        yield f"fleet.on_demand.after_s={wish.after_s:g} fleet.on_demand.back_after_s={wish.back_after_s:g}"
    if (stays := pricing.on_demand or pricing.reserved) is not None:
        yield f"fleet.price_usd_h={stays.usd_gpu_h:g}"
    if pricing.spot is not None:
        yield f"fleet.spot.price_usd_h={pricing.spot.usd_gpu_h:g}"
    if strategy.explore is not None and run.exploration is not None:
        seeds, steps = run.exploration.seeds_per_prompt, run.exploration.steps
        yield f"exploration.where={strategy.explore}"
        yield " ".join(
            f"exploration.{key}={value}"
            for key, value in (("seeds_per_prompt", seeds), ("steps", steps))
            if value is not None
        )
    if PipelinePart.SUBSET in parts:
        chosen = run.run_as(strategy).workload
        yield f"rollout.group_size={chosen.group_size} algorithm.train_samples={chosen.train_samples}"
    if PipelinePart.GAP in parts:
        yield "pipeline.axis=prompt algorithm.advantage.std=group"  # of the batch, all would have to be there
    if PipelinePart.SLICES in parts:
        sliced = run.pipeline
        yield f"pipeline.axis=generation pipeline.slice_size={sliced.slice_size}"
        yield f"pipeline.baseline={sliced.baseline}"
    if PipelinePart.TSP in parts:
        yield f"learner.timesteps_per_pass={work.timesteps_per_pass or 'auto'}"
    if parts & {PipelinePart.TAG, PipelinePart.STEAL}:
        yield "pipeline.trainers_generate=true"
    if PipelinePart.TCSS in parts:
        yield f"pipeline.next_share={run.pipeline.next_share:g}"


# -- SkyPilot ------------------------------------------------------------------------------------------------


def _sky_reserved(text: str, nodes: Candidate, config: str, settings: str) -> str:
    """The head's machine; without any reserved GPU, one without GPUs."""
    machine = nodes.reserved if nodes.reserved_nodes else nodes.spot
    text = _resources(text, machine)
    if not nodes.reserved_nodes:
        text = re.sub(r"\n  (accelerators|instance_type): [^\n]*", "", text)
        text = text.replace("  use_spot: false", f"  {_HEAD_MACHINE}\n  use_spot: false")
    given = shlex.quote(config)
    train = f'spotlight train {given} fleet.driver=ray fleet.address="$SPOTLIGHT_IP:6379" {settings} --plain'
    return _once(r"spotlight train [^\n]*", text, train)


def _sky_others(text: str, nodes: Candidate) -> str:
    text = _resources(text, nodes.spot)
    return _staying(text) if strategy_named(nodes.strategy).places.stays else text


def _sky_more(text: str, nodes: Candidate) -> str:
    """Further machines of the learner, which stay."""
    return _staying(_resources(text, nodes.reserved).replace("name: spotlight-spot", "name: spotlight-more"))


def _staying(text: str) -> str:
    text = text.replace("use_spot: true", "use_spot: false")
    return _once(r"SPOTLIGHT_KIND: spot[^\n]*", text, "SPOTLIGHT_KIND: reserved")


def _resources(text: str, machine: Machine) -> str:
    infra = "/".join(filter(None, machine.place))
    if not re.fullmatch(_INFRA, infra):  # a place by another name than SkyPilot's regions have
        infra = machine.cloud
    if infra:
        text = _once(r"  infra: [^\n]*", text, f"  infra: {infra}")
    named = f"\n  instance_type: {machine.name}" if machine.name else ""
    return _once(r"  accelerators: [^\n]*", text, f"  accelerators: {machine.gpu_type}:{machine.gpus}{named}")


def _commands(nodes: Candidate, candidate: Candidate, to_replace: Sequence[str]) -> str:
    """A shell script with the commands of docs/howto/launch-with-skypilot.md."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {shape_of(candidate)}.",
        "# Run it in Spotlight's repository; docs/howto/launch-with-skypilot.md explains it.",
        "set -euo pipefail",
        'here=$(dirname "$0")',
        "export SPOTLIGHT_TOKEN=${SPOTLIGHT_TOKEN:-$(openssl rand -hex 32)}",
        "sky launch --yes --cluster spotlight --detach-run \\",
        '  "$here/skypilot-reserved.yaml" --secret SPOTLIGHT_TOKEN',
        "SPOTLIGHT_HEAD=$(ssh spotlight hostname -I | tr ' ' '\\n' | head -n 1)",
        "export SPOTLIGHT_HEAD",
    ]
    if to_replace:
        advice = f"Replace {' and '.join(to_replace)} first (docs/howto/train-on-spot.md has examples)."
        found = " ".join(f"-e {text}" for text in to_replace)
        lines[5:5] = [
            f'if grep -l {found} "$here"/*.yaml >&2; then',
            f'  echo "{advice}" >&2',
            "  exit 1",
            "fi",
        ]
    if candidate.crossing:
        lines.insert(
            2,
            "# The pools are in different places: join their networks (VPN, peering) first.",
        )
    for count, name in ((nodes.reserved_nodes - 1, "more"), (nodes.spot_nodes, "spot")):
        if count > 0:
            lines.append(f"for i in $(seq 0 {count - 1}); do")
            lines.append(f'  sky jobs launch --yes --detach-run --name "spotlight-{name}-$i" \\')
            lines.append(f'    "$here/skypilot-{name}.yaml" --env SPOTLIGHT_HEAD --secret SPOTLIGHT_TOKEN')
            lines.append("done")
    return "\n".join(lines) + "\n"


# -- Kubernetes ----------------------------------------------------------------------------------------------


_COUNTED = ("evaluation.prompts=", "evaluation.images_per_prompt=")


def _kuberay(text: str, nodes: Candidate, config: str, settings: str) -> str:
    """The job: groups of pods as large as machines. Without spot pods or trainers, their group has none."""
    prompts = "data.train=/opt/spotlight/examples/prompts/ocr_train.txt"
    held_out = "data.test=/opt/spotlight/examples/prompts/ocr_test.txt"
    train = [
        f"spotlight train {shlex.quote(f'/opt/spotlight/{config}')}",
        *(prompts, held_out, "runs_dir=/shared/runs", "fleet.driver=ray fleet.address=auto"),
        # The prompts above are not those that were counted.
        " ".join(word for word in settings.split() if not word.startswith(_COUNTED)) + " --plain",
    ]
    entrypoint = "entrypoint: >-\n" + "\n".join(f"    {line}" for line in train) + "\n  submissionMode"
    text = _once(r"entrypoint: >-\n.*?\n  submissionMode", text, entrypoint)
    head, trainer = text.split("      - groupName: trainer\n")
    trainer, spot = trainer.split("      - groupName: spot\n")
    trainer = _group(trainer, nodes.reserved, nodes.reserved_nodes)
    spot = _group(spot, nodes.spot, nodes.spot_nodes)
    if strategy_named(nodes.strategy).places.stays:
        # Pods like the trainer's, without defining YAML's anchors again.
        spot = re.sub(r"&\w+", "", _group(trainer, nodes.spot, nodes.spot_nodes))
    return f"{head}      - groupName: trainer\n{trainer}      - groupName: spot\n{spot}"


def _group(text: str, machine: Machine, nodes: int) -> str:
    for key in ("replicas", "minReplicas", "maxReplicas"):
        text = _once(rf"        {key}: \d+", text, f"        {key}: {nodes}")
    return _once(r'nvidia.com/gpu: "\d+"', text, f'nvidia.com/gpu: "{machine.gpus}"')


def _once(pattern: str, text: str, by: str) -> str:
    found, count = re.subn(pattern, lambda _: by, text, count=1, flags=re.DOTALL)
    if not count:
        problem = Problem(
            "--launch", f"no {pattern} in a launch file", "the repository's files", "Restore them."
        )
        raise ConfigError("launch/", [problem])
    return found
