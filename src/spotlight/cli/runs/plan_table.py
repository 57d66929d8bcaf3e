"""Print the plan of ``spotlight train --dry-run``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from spotlight.cluster.local.emulation import FleetPlan
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting import NO_FITTING, Needs, find_fitting
from spotlight.dry_run.fitting_sizes import RANKS, SHORTER_PX
from spotlight.dry_run.memory_plan import (
    Estimate,
    checkpoint_parts,
    kept_gathered,
    may_share,
    peak_bytes,
    phase_bytes,
    published_parts,
    shared_parts,
    worker_parts,
)
from spotlight.dry_run.model_plan import ModelSizes, NotHere
from spotlight.dry_run.reward_plan import RewardPlace
from spotlight.dry_run.run_plan import Passes, RunPlan
from spotlight.licences import licence_line
from spotlight.models.media import MediaSize
from spotlight.report.wording import count, duration, money, plural, size
from spotlight.store.run_store import StoredRuns


def print_plan(
    console: Console, config: RunConfig, plan: RunPlan, fleet: FleetPlan | None, kept: StoredRuns | None
) -> None:
    """Print counts, parameters, memory, disk, and what it costs to keep the run elsewhere."""
    _print(console, "Work", _work(config, plan, kept))
    _print(console, "DiT passes of an iteration (one sample each)", _passes(plan))
    licence = ("licence of the weights", *licence_line(config.model.path))
    _print(console, "Parameters", [*_parameters(plan), licence])
    if plan.memory:
        peak = size(peak_bytes(plan.memory))
        where = "a GPU of the learner" if config.pipeline.trainers_generate else "the device"
        _print(console, f"Memory, estimated: {peak} on {where} at the peak", _estimates(plan.memory))
        _print(console, "Peaks by phase", _peaks(plan.memory))
        if may_share(config) and isinstance(plan.model, ModelSizes):
            _print(
                console, "Memory of a rank, where several share the model", _shared(config, plan, plan.model)
            )
        if config.fleet.driver == "ray":
            worker = size(peak_bytes(worker_parts(plan.memory)))
            why = "weights of every slot, whole, and its rollouts"
            _print(console, "Memory of a worker", [("each", worker, why)])
        if plan.needs is not None and config.fleet.driver == "inline":
            _print(console, "One GPU, estimated: spotlight train FILE --fit GB", _small(config, plan.needs))
        what = f"Largest sizes that fit, estimated: shorter sides to {max(SHORTER_PX)} pixels"
        _print(console, what, _fitting(config, plan))
    total = size(sum(part.bytes for part in plan.disk))
    known = "" if plan.parameters_trained is not None else " without checkpoints, which are unknown"
    _print(console, f"Disk, estimated: {total}{known}", _estimates(plan.disk))
    if kept is not None and (stored := checkpoint_parts(config, plan.parameters_trained)):
        copies = config.checkpoint.keep + config.checkpoint.best + 1
        costs = kept.store.costs(stored[0].bytes / copies, sum(part.bytes for part in plan.disk))
        _print(console, f"In {kept.address}, estimated", costs)
    if sent := published_parts(config, plan.parameters_trained):
        title = "Weights sent to workers, through Ray's object store: one on a node, on the head one per node"
        _print(console, title, _estimates(tuple(sent)))
    _print(console, "Rewards", _rewards(plan.rewards))
    if fleet is not None:
        _print(console, "Fleet, emulated on this machine", _fleet(config, fleet))
    for note in plan.notes:
        console.print(note, markup=False, soft_wrap=True)


def _print(
    console: Console, title: str, rows: Iterator[tuple[str, str, str]] | list[tuple[str, str, str]]
) -> None:
    table = Table(
        box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold"
    )
    wide = console.width >= 60  # where columns of several tables may stand below each other
    table.add_column(min_width=22 if wide else None, overflow="fold")
    table.add_column(min_width=14 if wide else None, overflow="fold", justify="right")
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _work(config: RunConfig, plan: RunPlan, kept: StoredRuns | None) -> Iterator[tuple[str, str, str]]:
    rollout, learner = config.rollout, config.learner
    where = f"{config.runs_dir if kept is None else kept.address}/{config.name}"
    if plan.trained >= config.iterations:
        yield "run", "finished", f"{plan.trained} iterations are trained: {where}"
    elif plan.trained:
        yield "run", "resumes", f"after iteration {plan.trained} of {config.iterations}: {where}"
    else:
        yield "run", "begins", where
    samples = f"{rollout.prompts_per_iteration} prompts x {rollout.group_size} pictures"
    yield "samples an iteration", count(plan.samples), samples
    if (chosen := config.algorithm.train_samples) is not None:
        why = f"{rollout.prompts_per_iteration} prompts x {chosen} of {rollout.group_size} pictures"
        yield "  trained", count(plan.trained_samples), f"{why}, by {config.algorithm.train_policy}"
    yield "iterations", count(config.iterations), f"{count(plan.samples * config.iterations)} samples in all"
    steps = f"{plural(config.iterations, 'iteration')} x {plural(learner.updates_per_batch, 'update')}"
    yield "optimizer steps", count(plan.optimizer_steps), steps
    prompts = f"{count(plan.train_prompts)} for training, {count(plan.test_prompts)} held out"
    yield "prompts", count(plan.train_prompts + plan.test_prompts), prompts
    images = (
        f"{count(plan.evaluation_images)} pictures each: {plan.test_prompts} prompts x "
        f"{config.evaluation.images_per_prompt}"
    )
    yield "evaluations", count(plan.evaluations), images


def _passes(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    passes: Passes = plan.passes
    timesteps = f"{plan.trained_timesteps} timesteps a sample"
    for name, number, why in (
        ("rollout forwards", passes.rollout, "the denoising steps"),
        ("policy forwards", passes.policy, timesteps),
        ("backwards", passes.backward, "about two forwards each"),
        ("recomputed forwards", passes.recomputed, "learner.recompute"),
        ("old-policy forwards", passes.old, timesteps),
        ("reference forwards", passes.reference, timesteps),
        ("old log-prob forwards", passes.old_log_probs, timesteps),
    ):
        if number:
            guided = f" x {plan.guidance} (guidance)" if plan.guidance > 1 else ""
            yield name, count(number), why + guided
    if passes.previews:
        yield "preview forwards", count(passes.previews), "exploration; at most, where a planner decides"
    yield "all forwards", count(passes.forwards), ""
    often = "forwards, every evaluation.every iterations"
    if passes.rollout:
        often += f"; {passes.evaluation / passes.rollout:.2g} times an iteration's rollout forwards"
    yield "one evaluation", count(passes.evaluation), often


def _parameters(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    if isinstance(plan.model, NotHere) or plan.parameters_trained is None:
        remedy = plan.model.remedy if isinstance(plan.model, NotHere) else ""
        where = "not a directory here, and not in the hub's cache"
        yield "of the DiT", "unknown", f"{where}; get it with: {remedy}"
        return
    model = plan.model
    yield (
        "of the DiT",
        count(model.parameters),
        f"{model.dimensions.layers} layers of width {model.dimensions.width}: {model.root}"
        + (f", as published; get it with: {model.remedy}" if model.remedy else ""),
    )
    share = plan.parameters_trained / model.parameters
    yield "trained", count(plan.parameters_trained), f"{plan.parameters_trained:,} ({share:.2%} of the DiT's)"


def _estimates(parts: tuple[Estimate, ...]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        held = {"always": "", "once loaded": "", "host": ", in this machine's memory"}
        yield part.part, size(part.bytes), part.formula + held.get(part.when, f", during {part.when}")


def _peaks(parts: tuple[Estimate, ...]) -> Iterator[tuple[str, str, str]]:
    for phase, peak in phase_bytes(parts).items():
        yield phase, size(peak), "once, before the DiT is read" if phase == "text encoding" else ""


def _rewards(places: tuple[RewardPlace, ...]) -> Iterator[tuple[str, str, str]]:
    for each in places:
        number = (
            "processes" if each.replicas is None else f"{each.replicas} process" + "es" * (each.replicas != 1)
        )
        details = [each.place]
        if each.asks:
            details.append(f"asks {each.asks}")
        if each.replicas is None:
            details.append("as many as it declares")
        if each.weights_bytes:
            details.append(f"{size(each.weights_bytes)} of weights each")
        if each.missing:
            details.append(f"memory unknown, not here yet: {', '.join(each.missing)}")
        yield each.reward, number, "; ".join(details)


def _shared(config: RunConfig, plan: RunPlan, model: ModelSizes) -> Iterator[tuple[str, str, str]]:
    why = "on each, also while loading: learner.shard divides weights, gradients and Adam"
    for ranks in sorted({2, 4, 8, config.fleet.learner_ranks} - {1}):
        yield f"{ranks} ranks", size(peak_bytes(shared_parts(config, model, plan.memory, ranks))), why
        why = ""
    if config.learner.keep_gathered == "auto" and config.fleet.driver == "inline":
        more = size(kept_gathered(config, model, plan.memory).bytes)
        yield "rollouts", more, "more, if free: the ranks then gather once per lease"


def _fitting(config: RunConfig, plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    together = may_share(config)
    for fit in plan.fitting:
        why = f"shared by {RANKS} ranks: {_sides(fit.shared)}" if together else ""
        yield f"a GPU of {fit.gpu_gib} GB", _sides(fit.alone), why


def _small(config: RunConfig, needs: Needs) -> Iterator[tuple[str, str, str]]:
    if (fitting := find_fitting()) is None:
        yield "what fits", "not known", f"this needs {NO_FITTING}"
    else:
        yield from fitting.small_gpus(config, needs)


def _sides(size: MediaSize | None) -> str:
    if size is None:
        return "none"
    frames = f" x {size.frames}" if size.frames > 1 else ""
    return f"{size.height} x {size.width}{frames}"


def _fleet(config: RunConfig, fleet: FleetPlan) -> Iterator[tuple[str, str, str]]:
    spot, ranks = config.fleet.spot, config.fleet.learner_ranks
    beside = " and roll out" if config.pipeline.trainers_generate else ""
    trains, moves = f"{ranks} of them train{beside}", config.fleet.learner_moves
    head = "only for the controller" if fleet.reserved_slots == 0 else "they roll out"
    yield "reserved slots", count(fleet.reserved_slots), head if moves else trains
    if config.fleet.learner_placement == "spot_then_on_demand":
        after = f"when the learner has waited {config.fleet.on_demand.after_s:g} s"
        yield "on-demand slots", count(ranks), f"{after}, {money(ranks * config.fleet.price_usd_h)} an hour"
    target = config.fleet.target
    source = "at most" if spot.trace is not None or target.is_set else "from the beginning"
    if target.is_set:
        goals = [
            *([] if target.deadline_h is None else [f"{target.deadline_h:g} h"]),
            *([] if target.budget_usd is None else [money(target.budget_usd)]),
        ]
        bounds = f"held by {target.nodes_min} to {target.nodes_max} spot nodes, from what is measured"
        yield "target", " and ".join(goals), bounds
    yield "spot slots", count(fleet.spot_slots), f"{source}; {trains}, and move" if moves else source
    if spot.trace is not None:
        known = spot.notice_s is not None
        notice = f"noticed {spot.notice_s:g} s before" if known else "noticed when the trace says"
        yield (
            "preemptions",
            count(fleet.preemptions),
            f"in {duration(fleet.horizon_s)} of {spot.trace}, {notice}",
        )
    prices = f"{money(config.fleet.price_usd_h)} a reserved slot, {money(spot.price_usd_h)} a spot slot"
    yield "an hour", money(fleet.usd_h), prices
