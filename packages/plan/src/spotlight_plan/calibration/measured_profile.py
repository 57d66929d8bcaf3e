"""A cost profile of what runs took. Pure.

What was measured says so; what the run was configured with is derived. What a run cannot tell apart is in one
figure, and the others of it are :data:`INCLUDED`: decoding and text encoding in ``denoise``, the optimizer
and old log-probs in ``train``, imports and model load in ``process_start_s``. What it does not tell is
assumed, bounded by what it had: memory by that of its GPUs, batches beyond the run's and timesteps per pass
by proportion. A profile of several runs has the mean of theirs, weighted by work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import yaml

from spotlight.config.schema import RunConfig
from spotlight_fleet.gpus import GPU_TYPES
from spotlight_plan.calibration.run_times import RolloutTimes, RunTimes
from spotlight_plan.scenarios.profile import Profile, parse_profile, timesteps_that_fit
from spotlight_plan.scenarios.profile_costs import ProfiledWorkload
from spotlight_rewards.base.errors import ConfigError, Problem

INCLUDED = 1e-9
"""A cost that another figure contains."""

_Figure = dict[str, object]


def measured_profile(runs: Sequence[RunTimes]) -> Profile:
    """The profile of runs of one model.

    Raises:
        ConfigError: runs of different models, or one in which no worker denoised.
    """
    return parse_profile(measured_yaml(runs), "that was measured")


def measured_yaml(runs: Sequence[RunTimes]) -> str:
    """The text of :func:`measured_profile`. Raises :class:`ConfigError`."""
    _require_one_model(runs)
    first, labels = runs[0].config, _labels(runs)
    tree = {
        "name": f"{first.model.path}, measured",
        "family": first.model.family,
        "heads": _figure(
            math.lcm(*(_degree(run.config) for run in runs)),
            labels,
            "its sequence-parallel degree",
            "derived",
        ),
        "frames": first.rollout.frames,
        "train_has_log_probs": _has_log_probs(first),
        "lease_pixels": _figure(
            max(_pixels(run.config) * run.config.rollout.batch_size / _degree(run.config) for run in runs),
            labels,
            "its rollout.batch_size",
            "derived",
        ),
        "weights": _weights(runs, labels),
        "memory": _memory(runs, labels),
        "rewards": {
            "latency_s": _figure(
                _mean(runs, lambda run: run.reward_wait_s), labels, "waiting for rewards alone"
            ),
            "s_per_sample": _figure(0, labels, "contained in latency_s"),
        },
        "optimizer_step_s": _figure(0, labels, "contained in train"),
        "prepare_s": _figure(0, labels, "contained in train"),
        "pass_share": _figure(0, labels, "no gain of more timesteps per pass is promised", "assumed"),
        "switch_s": _figure(
            max(run.config.pipeline.switch_s for run in runs), labels, "its pipeline.switch_s", "derived"
        ),
        "infrastructure": _infrastructure(runs, labels),
        "gpus": {gpu: _gpu(runs, gpu, labels) for gpu in _gpu_types(runs)},
    }
    return yaml.safe_dump(tree, sort_keys=False, width=110, allow_unicode=True)


def workload_of(config: RunConfig, learner_gpu: str, profile: Profile) -> ProfiledWorkload:
    """A run's workload, for a profile of this run or of another origin."""
    timesteps, per_pass = config.trained_timesteps, config.learner.timesteps_per_pass
    if per_pass == "auto":
        per_pass = timesteps_that_fit(profile, learner_gpu, config.fleet.learner_ranks, timesteps, 0.0)
    return ProfiledWorkload(
        pixels=_pixels(config),
        trained_timesteps=timesteps,
        learner_gpu=learner_gpu,
        guidance=_forwards(config) > 1,
        recomputes_log_probs=_has_log_probs(config),
        timesteps_per_pass=min(per_pass, timesteps),
        resident=not config.pipeline.switch_s,
        lease_samples=config.rollout.batch_size,
        switch_s=config.pipeline.switch_s,
    )


def _require_one_model(runs: Sequence[RunTimes]) -> None:
    for key, values in (
        ("model.path", [run.config.model.path for run in runs]),
        ("rollout.frames", [run.config.rollout.frames for run in runs]),
        ("training with old log-probs", [_has_log_probs(run.config) for run in runs]),
    ):
        if len(set(values)) > 1:
            found = ", ".join(f"{run.label}: {value}" for run, value in zip(runs, values, strict=True))
            remedy = "A profile is of one model, trained in one way: calibrate each of them apart."
            raise ConfigError("the runs", [Problem(key, found, "the same of all runs", remedy)])
    for run in runs:
        if not any(times.sample_steps for times in run.rollouts.values()):
            remedy = "Its learner's slots may have rolled out alone; take a run with other workers."
            found = "none after the first iteration"
            raise ConfigError(run.label, [Problem("rollouts", found, "workers that only roll out", remedy)])


def _figure(value: float, labels: str, detail: str, kind: str = "measured") -> _Figure:
    kind = kind if value or kind == "assumed" else "derived"  # 0: another figure contains it
    return {"value": float(value) or INCLUDED, "source": f"{kind}: {labels}: {detail}"}


def _mean(runs: Sequence[RunTimes], of: Callable[[RunTimes], float]) -> float:
    return sum(of(run) for run in runs) / len(runs)


def _ratio(seconds: float, count: float) -> float:
    return seconds / count if count else 0.0


def _weights(runs: Sequence[RunTimes], labels: str) -> dict[str, _Figure]:
    size, state = max(run.weight_bytes for run in runs), max(run.state_bytes for run in runs)
    return {
        "full_bytes": _figure(0, labels, "contained in infrastructure.process_start_s"),
        "adapter_bytes": _figure(size, labels, "its adapter"),
        "learner_state_bytes": _figure(state, labels, "its newest checkpoint"),
    }


def _memory(runs: Sequence[RunTimes], labels: str) -> dict[str, object]:
    """Bounds: smaller GPUs than a run had, and more timesteps per pass, are refused."""
    rolling = min(GPU_TYPES[gpu].vram_bytes for run in runs for gpu in run.rollouts)
    training = min(GPU_TYPES[run.learner.gpu_type].vram_bytes for run in runs)
    fitted = "it fitted its GPUs; less is not known to do"
    more = "no more timesteps per pass are known to fit"
    return {
        "bounds": True,
        "rollout_bytes": _figure(rolling, labels, fitted, "assumed"),
        "learner_bytes_per_rank": _figure(training - 1, labels, fitted, "assumed"),
        "learner_bytes_sharded": _figure(1, labels, "contained in learner_bytes_per_rank", "assumed"),
        "pass_bytes": _figure(training, labels, more, "assumed"),
    }


def _infrastructure(runs: Sequence[RunTimes], labels: str) -> dict[str, _Figure]:
    workers = [times for run in runs for times in run.rollouts.values()]
    start_s = _ratio(sum(one.setup_s for one in workers), sum(one.starts for one in workers))
    pull_s = _ratio(sum(one.pull_s for one in workers), sum(one.pulls for one in workers))
    publish_s = _ratio(sum(run.learner.publish_s for run in runs), sum(run.learner.versions for run in runs))
    save_s = _ratio(
        sum(run.learner.checkpoint_s for run in runs), sum(run.learner.checkpoints for run in runs)
    )
    size, state = max(run.weight_bytes for run in runs), max(run.state_bytes for run in runs)
    rate = _figure(
        size / max(INCLUDED, (publish_s + pull_s) / 2),
        labels,
        f"weights published in {publish_s:.3g} s and pulled in {pull_s:.3g} s, latency included",
        "derived",
    )
    return {
        "intra_node_bytes_s": rate,
        "network_bytes_s": dict(rate),
        "store_bytes_s": dict(rate),
        "disk_bytes_s": _figure(
            state / max(INCLUDED, save_s), labels, f"a checkpoint takes {save_s:.3g} s", "derived"
        ),
        "process_start_s": _figure(start_s, labels, "from a worker's start until it could work"),
        "imports_s": _figure(0, labels, "contained in process_start_s"),
        "model_load_s": _figure(0, labels, "contained in process_start_s"),
        "group_setup_s": _figure(0, labels, "contained in process_start_s"),
    }


def _gpu_types(runs: Sequence[RunTimes]) -> list[str]:
    return sorted({gpu for run in runs for gpu in (*run.rollouts, run.learner.gpu_type)})


def _gpu(runs: Sequence[RunTimes], gpu: str, labels: str) -> dict[str, object]:
    denoised = [run for run in runs if run.rollouts.get(gpu, RolloutTimes()).sample_steps]
    trained = [run for run in runs if run.learner.gpu_type == gpu]
    shapes = {(_degree(run.config), _pixels(run.config)) for run in denoised}
    return {
        "denoise": [point for shape in sorted(shapes) for point in _step_points(denoised, shape, gpu)],
        "batch_slope": _figure(1, labels, "larger batches in proportion", "assumed"),
        "train": [
            _train_point(trained, pixels) for pixels in sorted({_pixels(run.config) for run in trained})
        ],
        "decode_ms_per_megapixel": _figure(0, labels, "contained in denoise"),
    }


def _step_points(runs: Sequence[RunTimes], shape: tuple[int, int], gpu: str) -> Iterator[_Figure]:
    """Points of one degree and size: of one sample, and of each batch that a run had."""
    alike = [run for run in runs if (_degree(run.config), _pixels(run.config)) == shape]
    for batch in sorted({1, *(run.config.rollout.batch_size for run in alike)}):
        same = [run for run in alike if run.config.rollout.batch_size == batch]
        of = same or alike
        seconds = sum(run.rollouts[gpu].denoise_s / _forwards(run.config) for run in of) / shape[0]
        sample_steps = sum(run.rollouts[gpu].sample_steps for run in of)
        detail = f"{seconds:,.1f} s for {sample_steps:,} steps of samples" + (
            "" if same else ", in proportion"
        )
        yield {
            "height": of[0].config.rollout.height,
            "width": of[0].config.rollout.width,
            "batch": batch,
            "sp": shape[0],
            "ms": 1000 * batch * seconds / sample_steps,
            "source": f"{'measured' if same else 'derived'}: {_labels(of)}: {detail}",
        }


def _train_point(runs: Sequence[RunTimes], pixels: int) -> _Figure:
    alike = [run for run in runs if _pixels(run.config) == pixels]
    seconds = sum(run.learner.train_s / _forwards(run.config) for run in alike)
    passes = sum(
        run.learner.samples * run.config.trained_timesteps / run.config.fleet.learner_ranks for run in alike
    )
    return {
        "height": alike[0].config.rollout.height,
        "width": alike[0].config.rollout.width,
        "s": seconds / passes,
        "source": f"measured: {_labels(alike)}: {seconds:,.1f} s for {passes:,.0f} timesteps of samples",
    }


def _labels(runs: Sequence[RunTimes]) -> str:
    return ", ".join(run.label for run in runs)


def _has_log_probs(config: RunConfig) -> bool:
    """Whether old log-probs are evaluated again: a batch's first update needs none."""
    return config.algorithm.recomputes_log_probs and config.learner.updates_per_batch > 1


def _pixels(config: RunConfig) -> int:
    return config.rollout.height * config.rollout.width


def _degree(config: RunConfig) -> int:
    return config.fleet.sequence_parallel.degrees[0]


def _forwards(config: RunConfig) -> int:
    return 2 if config.rollout.true_cfg_scale > 1 else 1
