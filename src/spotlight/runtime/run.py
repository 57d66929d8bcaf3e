"""A run on this machine, from configuration to summary.

    check everything ─► open the run directory ─► resume or begin ─► drive ─► export and summarise

Errors in model, prompts, rewards or batch sizes are raised before the run directory is touched. The same
configuration resumes at its newest intact checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from spotlight.config.load import dump_config
from spotlight.config.schema import RunConfig
from spotlight.garbage import collection_paused
from spotlight.rollout.stored_pictures import StoredPictures, require_readable
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import Learning, assemble, fill_embeddings, prepare_model
from spotlight.runtime.attempt import RunResult as RunResult
from spotlight.runtime.attempt import open_attempt
from spotlight.runtime.clock import PhaseClock
from spotlight.runtime.conclusion import conclude_run, export_judged
from spotlight.runtime.inline import Denoiser, InlineDriver
from spotlight.runtime.main_turn import MainTurn
from spotlight.runtime.observer import Observer
from spotlight.runtime.preflight import finished_note, finished_summary, require_disk, require_startable
from spotlight.runtime.process import explain_out_of_memory, prepare_process
from spotlight.runtime.recorder import LEARNER_FOLDER, Recorder, RunRecorder, restored_controller
from spotlight.runtime.resuming.course import Resuming
from spotlight.runtime.signals import stopping_gracefully
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.types import Phase, WorkerId
from spotlight.store.checkpoints import Checkpoint
from spotlight.store.run_directory import RunDirectory, RunPaths
from spotlight.training.settings import compute_type, traced_phases
from spotlight.training.sharding import Ranks, RolloutGathering, process_group
from spotlight_kernels.measure.step_profile import StepProfiler
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.pool.reward_pool import RewardPool


@dataclass(slots=True)
class _Materials:
    config: RunConfig
    ranks: Ranks
    prompts: build.Prompts
    learning: Learning
    denoiser: Denoiser
    rewards: RewardPool
    turn: MainTurn
    around: Callable[[Phase], AbstractContextManager[object]] = nullcontext


def train(
    config: RunConfig, observer: Observer, spent_s: float = 0.0, *, profiled_steps: int = 0
) -> RunResult:
    """Run or resume a configuration to its end; a finished run returns at once.

    Args:
        spent_s: seconds before this call (process start, imports), billed as set-up.
        profiled_steps: of rollouts and of training, to be traced on the main rank.

    Raises:
        ConfigError, PromptFileError, ModelError, RewardSetupError, RewardInputError: before any work.
        StoreError: the run directory or the disk.
        DeviceMemoryError: too little device memory.
        TrainingError: non-finite gradients.
    """
    clock = PhaseClock(spent_s=spent_s)
    if (summary := finished_summary(config)) is not None:
        observer.note(finished_note(config, summary))
        return RunResult(config.runs_dir / config.name)
    device = build.pick_device(config)
    prepare_process(device, config.deterministic, config.model.tf32)
    with ExitStack() as stack, explain_out_of_memory(clock):
        ranks = stack.enter_context(process_group(device, config.fleet.learner_collective_s))
        with collection_paused():  # model libraries are imported
            materials = _gather(config, device, ranks, stack)
        if profiled_steps and ranks.is_main:
            folder = RunPaths(config.runs_dir / config.name).profile
            traced = traced_phases(config.learner, device, observer.note)
            profiler = StepProfiler(folder, traced, profiled_steps, observer.note)
            stack.callback(profiler.close)
            materials.around = profiler.step
        if not ranks.is_main:
            with materials.turn.take():  # rank 0 opens the ledger
                pass
            return _drive(
                materials,
                observer,
                clock,
                Recorder(ranks, materials.prompts.by_id, config.evaluation.strict),
            )
        directory = stack.enter_context(
            RunDirectory.open(config.runs_dir, config.name, dump_config(config), Resuming(config))
        )
        return _as_main(materials, directory, observer, clock)


# -- before the run directory --------------------------------------------------------------------------


def _gather(config: RunConfig, device: torch.device, ranks: Ranks, stack: ExitStack) -> _Materials:
    if problems := list(config.rank_problems(ranks.world, ranks.per_node)):
        raise ConfigError(f"this configuration on {ranks.world} ranks", problems)
    prompts = require_startable(config)
    used = prompts.used(config)
    if ranks.is_main:
        require_disk(config, prompts)
        if config.algorithm.trains_on_stored:
            require_readable(used)
    # The rewards' mistakes are the user's, and reported before a large model is downloaded and read.
    rewards = stack.enter_context(build.make_reward_pool(config))
    rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
    model = prepare_model(config, device)
    conditions = fill_embeddings(config, model, used, ranks)
    learning = assemble(config, model, conditions, ranks)
    engine = build.make_engine(config, model.family, learning.negative)
    denoiser = Denoiser(
        engine,
        learning.slots,
        conditions,
        model.recipes,
        model.algorithm.rollout_slot,
        config.evaluation.weights,
        RolloutGathering(config.learner.keep_gathered, ranks, device, compute_type(config.learner)).around,
        stored=StoredPictures(model.family, prompts.by_id, config.rollout.group_size)
        if config.algorithm.trains_on_stored
        else None,
    )
    return _Materials(config, ranks, prompts, learning, denoiser, rewards, MainTurn(ranks))


# -- the main rank's run directory ---------------------------------------------------------------------


def _as_main(
    materials: _Materials, directory: RunDirectory, observer: Observer, clock: PhaseClock
) -> RunResult:
    config, ranks = materials.config, materials.ranks
    opening = open_attempt(
        config,
        directory,
        materials.prompts,
        ranks,
        workers={WorkerId(f"rank-{rank}"): config.fleet.price_usd_h for rank in range(ranks.world)},
        began_s=time.time() - clock.elapsed_s,
        scored_by=materials.rewards.scored_by,
        observer=observer,
        account=lambda recorder: recorder.spend(clock.take()),
        keep_alive=materials.turn.keep_alive,
    )
    with ExitStack() as stack:
        with materials.turn.take():
            attempt = stack.enter_context(opening)
        result = attempt.result = _drive(materials, observer, clock, attempt.recorder, attempt.newest)
    return result


def _drive(
    materials: _Materials,
    observer: Observer,
    clock: PhaseClock,
    recorder: Recorder,
    newest: Checkpoint | None = None,
) -> RunResult:
    config, ranks = materials.config, materials.ranks
    controller = _resume(materials, newest)  # synchronises all ranks: the run directory exists from here on
    materials.rewards.log_to(
        RunPaths(config.runs_dir / config.name).attempts, prefix=f"rank-{ranks.rank}-reward"
    )
    materials.rewards.tell(observer.note)
    driver = InlineDriver(
        controller=controller,
        denoiser=materials.denoiser,
        feed=materials.learning.feed,
        rewards=materials.rewards,
        recorder=recorder,
        clock=clock,
        observer=observer,
        ranks=ranks,
        turn=materials.turn,
        lease_size=config.rollout.batch_size * ranks.world,
        deal_size=_deal_size(config),
        grid=config.evaluation.grid,
        training_pictures_every=config.metrics.training_pictures_every,
        around=materials.around,
    )
    clock.ready()
    with stopping_gracefully(driver.request_stop, observer):
        error = driver.run()
    result = RunResult(config.runs_dir / config.name, error, driver.stopped)
    if result.finished:
        learning = materials.learning
        weights = export_judged(config, learning.model.family, learning.slots, ranks)
        if isinstance(recorder, RunRecorder):
            conclude_run(config, recorder, weights, lambda: recorder.spend(clock.take()))
    return result


def _deal_size(config: RunConfig) -> int:
    """Consecutive rollouts that all ranks get equal shares of, so that hardly any sample moves to train.

    Of an update; of a group where its samples stay together in a micro-batch and all of them are trained.
    """
    if config.algorithm.compares_groups and config.algorithm.train_samples is None:
        return config.rollout.group_size
    return (
        config.rollout.prompts_per_iteration * config.rollout.group_size // config.learner.updates_per_batch
    )


def _resume(materials: _Materials, newest: Checkpoint | None) -> Controller:
    config, ranks = materials.config, materials.ranks
    plan = build.plan_of(config, ranks.world, compares=bool(materials.rewards.compares_groups))
    (where, *_) = ranks.share(str(newest.directory) if newest else "")
    if not where:
        return Controller(plan, materials.prompts.train, materials.prompts.test)
    materials.learning.learner.load(Path(where) / LEARNER_FOLDER)
    return restored_controller(Path(where), plan, materials.prompts)
