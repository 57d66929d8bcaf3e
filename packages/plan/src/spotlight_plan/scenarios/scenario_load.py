"""Load scenario files: shipped ones by name, inheritance from a base file, overrides, readable errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spotlight.config.load import apply_override, sections_in
from spotlight.config.removed import REMOVED, Removed, without_removed
from spotlight.config.requires import Requirement, Requires, at_least, at_most, problems_of
from spotlight.config.sections.exploration import seeds_require
from spotlight.config.sections.pipeline import slices_require
from spotlight_fleet.gpus import unknown_gpus
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import (
    STRATEGIES,
    PipelinePart,
    Strategy,
    UnknownStrategyError,
    strategy_named,
)
from spotlight_rewards.base.errors import ConfigError, Problem, did_you_mean
from spotlight_rewards.base.file_errors import is_there
from spotlight_rewards.base.yaml_tree import merge, read_tree

_BASE = "base"
"""Key that names the file to inherit from: a shipped scenario, or a path relative to this file."""
_REMOVED = (
    *REMOVED,
    Removed(
        "plan.candidates_max",
        (),
        "All candidates are ranked without simulation: remove it. plan.iterations and run.starts say how "
        "much is simulated of the best.",
    ),
)
_KIND = "trace.kind"
_DEPTH_MAX = 8


def scenario_names() -> tuple[str, ...]:
    """Names of the shipped scenarios."""
    folder = files("spotlight_plan.scenarios").joinpath("shipped")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


def load_scenario(
    name: str,
    overrides: Sequence[str] = (),
    *,
    trace: Path | None = None,
    seed: int | None = None,
    starts: int | None = None,
) -> ScenarioFile:
    """Read a shipped scenario by name, or a file by path.

    Args:
        overrides: ``key.subkey=value`` in YAML syntax, applied in order. Sections merge; a trace of another
            kind replaces the scenario's.
        trace: trace file that replaces the scenario's trace; the notice settings stay.
        seed: replaces ``run.seed``.
        starts: replaces ``run.starts``.

    Raises:
        ConfigError: every problem found, each with key, value, expectation and remedy.
    """
    tree = _tree(name, None, 0)
    if trace is not None:
        lead = {key: value for key, value in _section(tree, "trace").items() if key == "notice_lead_s"}
        tree["trace"] = {"kind": "file", "path": str(trace), **lead}
    for override in overrides:
        apply_override(_without_another_kind(tree, override), override)
    for key, value in (("run.seed", seed), ("run.starts", starts)):
        if value is not None:
            apply_override(tree, f"{key}={value}")
    where = f"the scenario {name}" + (f" with {' '.join(overrides)}" if overrides else "")
    return build_scenario(tree, where)


def build_scenario(tree: Mapping[str, Any], where: str) -> ScenarioFile:
    """Validate a nested mapping. Raises :class:`ConfigError`."""
    tree, removed = without_removed(tree, _REMOVED)
    if removed:
        raise ConfigError(where, removed)
    try:
        # JSON strict mode accepts lists for tuples and strings for paths, and nothing looser.
        scenario = ScenarioFile.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems: dict[str, Problem] = {}  # by key, because each kind of a union has one of its own
        for detail in error.errors():
            problem = _explain(tree, detail)
            problems.setdefault(problem.key, problem)
        raise ConfigError(where, list(problems.values())) from None
    if contradictions := list(_contradictions(scenario)):
        raise ConfigError(where, contradictions)
    return scenario


def _tree(name: str, beside: Path | None, depth: int) -> dict[str, Any]:
    if name in scenario_names():
        with as_file(files("spotlight_plan.scenarios").joinpath(f"shipped/{name}.yaml")) as path:
            tree = read_tree(path)
        folder = None
    else:
        path = Path(name) if beside is None else beside / name
        if not (is_there(path) and path.is_file()):
            expected = f"a YAML file, or one of {', '.join(scenario_names())}"
            key = "SCENARIO" if depth == 0 else _BASE
            remedy = did_you_mean(name, scenario_names(), "Name one that exists.")
            raise ConfigError("the scenario", [Problem(key, repr(name), expected, remedy)])
        tree = read_tree(path)
        folder = path.parent
        section = _section(tree, "trace")
        if isinstance(section.get("path"), str):
            section["path"] = str(folder / section["path"])
    base = tree.pop(_BASE, None)
    if base is None:
        return tree
    if not isinstance(base, str) or depth == _DEPTH_MAX:
        expected = f"a name or path, at most {_DEPTH_MAX} deep"
        raise ConfigError(name, [Problem(_BASE, repr(base), expected, "Name another scenario.")])
    below = _tree(base, folder, depth + 1)
    if _section(tree, "trace").get("kind") not in (None, _section(below, "trace").get("kind")):
        below.pop("trace", None)
    return merge(below, tree)


def _without_another_kind(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key = override.partition("=")[0]
    if key in {"trace", _KIND}:
        over: dict[str, Any] = {}
        apply_override(over, override)  # alone, to see which kind it selects
        if _section(over, "trace").get("kind", was := _section(tree, "trace").get("kind")) != was:
            tree["trace"] = {}
    return tree


def _section(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


# -- errors ------------------------------------------------------------------------------------------------


def _explain(tree: Mapping[str, Any], detail: ErrorDetails) -> Problem:
    parts = [str(part) for part in detail["loc"]]
    if len(parts) > 1 and parts[0] == "trace" and parts[1] == _section(tree, "trace").get("kind"):
        del parts[1]  # the union's tag is not a key in the file
    if parts[:1] == ["iterations_to_target"]:
        del parts[3:]
    key = ".".join(parts) or "SCENARIO"
    if detail["type"] == "extra_forbidden":
        known = sorted(_fields_at(ScenarioFile, parts[:-1], tree))
        remedy = did_you_mean(parts[-1], known, "Remove it.")
        return Problem(key, "an unknown key", f"one of {', '.join(known)}", remedy)
    if detail["type"] in {"missing", "union_tag_not_found"}:
        key = f"{key}.kind" if detail["type"] == "union_tag_not_found" else key
        return Problem(key, "nothing", "a value", "Add the key; docs/howto/simulate-and-plan.md explains it.")
    if detail["type"] == "union_tag_invalid":
        context = detail.get("ctx", {})
        expected = str(context.get("expected_tags"))
        return Problem(f"{key}.kind", repr(context.get("tag")), expected, "Change the value.")
    expected = detail["msg"].removeprefix("Input should be ")
    if "pattern" in expected:
        stated = "a source that begins with published:, measured:, derived: or assumed:"
        expected = stated if key.endswith("source") else "a name on one line"
    return Problem(key, repr(detail["input"]), expected, "Change the value.")


def _fields_at(model: type[BaseModel], path: Sequence[str], tree: Mapping[str, Any]) -> set[str]:
    models = [model]
    for part in path:
        found = [
            section
            for one in models
            if part in one.model_fields
            for section in sections_in(one.model_fields[part].annotation)
        ]
        models = found or models
    kind = _section(tree, "trace").get("kind")
    chosen = [
        one for one in models if "kind" in one.model_fields and one.model_fields["kind"].default == kind
    ]
    return {name for one in (chosen or models) for name in one.model_fields}


# -- contradictions ----------------------------------------------------------------------------------------


def _contradictions(scenario: ScenarioFile) -> Iterator[Problem]:
    """Conflicts between keys that can be found without reading other files."""
    yield from _cluster(scenario)
    strategies: dict[str, Strategy] = {}
    for key, names in (
        ("strategies", scenario.strategies),
        ("iterations_to_target", tuple(scenario.iterations_to_target)),
        ("plan.strategies", scenario.plan.strategies),
    ):
        if not names and key != "iterations_to_target":
            yield Problem(key, "none", f"one or more of {', '.join(STRATEGIES)}", "Name one.")
        for name in names:
            try:
                strategy = strategy_named(name)
            except UnknownStrategyError as error:
                yield error.problem(key)
                continue
            if key != "iterations_to_target":
                strategies[name] = strategy
            yield from _strategy_problems(scenario, key, name, strategy)
        if len(set(names)) < len(names):
            yield Problem(key, ", ".join(names), "every strategy once", "Remove the second.")
    for name, target in scenario.iterations_to_target.items():
        if not target.ends[0] <= target.iterations <= target.ends[1]:
            key, expected = f"iterations_to_target.{name}.value", "[fewest, likely, most]"
            yield Problem(key, str(target.value), expected, "Put them in ascending order.")
    yield from dict.fromkeys(
        problem
        for strategy in strategies.values()
        for problem in problems_of(
            slices_require("workload.train_samples"),
            SimpleNamespace(
                pipeline=scenario.pipeline.of(strategy),
                exploration=strategy.explore,
                workload=scenario.workload,
            ),
        )
    )
    exploring = [name for name, strategy in strategies.items() if strategy.explore is not None]
    if scenario.exploration is None and set(exploring) & set(scenario.strategies):
        remedy = "Add seeds_per_prompt and steps, or leave these strategies out."
        yield Problem("exploration", "nothing", f"a section, for {', '.join(exploring)}", remedy)
    yield from problems_of(_ROWS, scenario)


_ROWS: tuple[Requirement[ScenarioFile], ...] = (
    *(Requires(key, {}, at_least("workload.group_size"),  # as many let a planner explore nothing
               "A group is chosen among the previews: make as many or more.")
      for key in ("exploration.seeds_per_prompt", "exploration.planner.seed_counts")),
    *seeds_require("workload"),
    Requires("workload.train_samples", {}, at_most("workload.group_size"),
             "They are chosen among the generated ones."),
    Requires("workload.updates_per_batch", {}, at_most("workload.prompts"), "An update trains whole groups."),
)  # fmt: skip


def _strategy_problems(scenario: ScenarioFile, key: str, name: str, strategy: Strategy) -> Iterator[Problem]:
    """Of a strategy that a key names."""
    if PipelinePart.SUBSET in strategy.parts and scenario.workload.train_samples is not None:
        remedy = f"Set it to null, or remove +{PipelinePart.SUBSET}."
        found = str(scenario.workload.train_samples)
        yield Problem("workload.train_samples", found, f"null with {name}", remedy)
    if PipelinePart.SUBSET in strategy.parts and scenario.too_few_for_subsets:
        remedy = f"Raise it, or remove +{PipelinePart.SUBSET}."
        few = str(scenario.workload.group_size)
        yield Problem("workload.group_size", few, f"4 or more with {name}", remedy)
    if key == "plan.strategies" and strategy.baseline is not None:
        remedy = "It is a model of how others run, which cannot be recommended: leave it out."
        yield Problem(key, repr(name), "strategies that run here", remedy)


def _is_on_reserved(name: str) -> bool:
    try:
        return not strategy_named(name).is_all_spot
    except UnknownStrategyError:
        return False  # reported on its own


def _cluster(scenario: ScenarioFile) -> Iterator[Problem]:
    reserved, spot = scenario.cluster.reserved, scenario.cluster.spot
    standing = [name for name in scenario.strategies if _is_on_reserved(name)]
    if reserved.nodes == 0 and (standing or scenario.learner.gpus is None):
        expected = f"1 or more for {', '.join(standing)}" if standing else "1 or more, or learner.gpus"
        remedy = "The learner and all that is committed live on reserved GPUs: rent at least one"
        yield Problem(
            "cluster.reserved.nodes", "0", expected, f"{remedy}, or take all_spot with learner.gpus."
        )
    yield from unknown_gpus(
        (key, name)
        for key, names in (
            ("cluster.reserved.gpu_type", (reserved.gpu_type,)),
            ("cluster.spot.gpu_type", (spot.gpu_type,)),
            ("plan.gpu_types", scenario.plan.gpu_types),
            ("plan.spot_gpu_types", scenario.plan.spot_gpu_types),
        )
        for name in names
    )
    ranks = max(reserved.nodes * reserved.gpus_per_node, scenario.ranks)
    if scenario.samples < ranks:
        found = f"{scenario.samples} samples of an iteration"
        remedy = "Raise workload.prompts, or reserve fewer nodes."
        yield Problem("workload.prompts", found, f"one for each of {ranks} learner GPUs at least", remedy)
