"""The testbed as a laboratory of seed exploration: real model, rewards, controller and learner, no disk.

A run is one of the inline driver's, kept in memory. Exploration in idle time is emulated in one process: when
a batch is prepared, its window's previews are made and scored first, and the learner goes on after them. So
they are made with the weights that a worker beside the learner would hold, one version older than those
that regenerate the chosen seeds, and all of them are done: an emulation of slots enough. How long that takes
where slots are beside the learner is the simulator's to say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import PreviewTime
from spotlight.rollout.state import FinishedRollout
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import Learning, assemble, fill_embeddings, prepare_model
from spotlight.runtime.clock import PhaseClock
from spotlight.runtime.inline import Denoiser, InlineDriver
from spotlight.runtime.main_turn import MainTurn
from spotlight.runtime.observer import Observer
from spotlight.runtime.process import prepare_process
from spotlight.runtime.recorder import Picture, Recorder
from spotlight.runtime.validation import strict_curve
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import CommitCheckpoint, ReportEvaluation
from spotlight.scheduler.policies.exploration.explorer import arms_of
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Phase, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.learner import Learner
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import ScoredSample

Weights = dict[str, Tensor]


@dataclass(slots=True)
class MemoryRecorder(Recorder):
    """A recorder that keeps what a run reports in memory.

    Attributes:
        validations: rows by iteration.
        rows: of iterations.
        trained: called with every iteration whose last update is applied.
    """

    trained: Callable[[int], None]
    validations: dict[int, dict[str, float]] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)

    def evaluation(
        self, effect: ReportEvaluation, samples_trained: int, pictures: Mapping[Rollout, Picture | None]
    ) -> dict[str, float]:
        """Keep the row."""
        row = Recorder.evaluation(self, effect, samples_trained, pictures)
        self.validations[effect.iteration] = row
        return row

    def iteration(self, iteration: int, samples_trained: int, row: Mapping[str, float]) -> None:
        """Keep the row."""
        self.rows.append(dict(row))
        self.trained(iteration)

    def checkpoint(self, effect: CommitCheckpoint, learner: Learner) -> None:
        """Nothing."""


class BesideTraining(InlineDriver):
    """An inline driver that makes what is for the next iteration while a batch waits to be trained.

    Of early rollouts (``pipeline.next_share``) all are then one version stale, the most that a cluster has.
    """

    def _next_event(self) -> ev.Event:
        events, controller = self._events, self.controller
        waits = bool(events) and isinstance(events[0], ev.BatchPrepared)
        if not waits or not any(work.unscored for work in controller.work.extra):
            return super()._next_event()
        if len(events) == 1 and not controller.queue.outstanding:
            if self._unsubmitted:
                self._submit()
            self._collect(self._scoring.popleft())
        if len(events) == 1:
            return self._pull()
        events.rotate(-1)
        return events.popleft()


@dataclass(frozen=True, slots=True)
class Lab:
    """A model about to be trained, with what judges it."""

    config: RunConfig
    prompts: build.Prompts
    learning: Learning
    denoiser: Denoiser
    rewards: RewardPool

    def train(
        self,
        where: PreviewTime | None,
        trained: Callable[[int], None] = lambda iteration: None,
        now_s: Callable[[], float] | None = None,
    ) -> MemoryRecorder:
        """Train to the end. Once for each lab.

        Args:
            where: seeds are explored as the configuration says, but there; None: not at all.
            trained: called with every trained iteration.
            now_s: the clock of ``seconds/...``; default: the wall's.

        Raises:
            RuntimeError: the controller stopped the run.
        """
        plan = build.plan_of(self.config)
        exploration = plan.exploration
        if where is None or exploration is None:
            plan = dataclasses.replace(plan, exploration=None)
        else:
            planned = max(arm.seeds_per_prompt for arm in arms_of(plan)) if where == "idle" else None
            there = exploration.model_copy(update={"where": where, "seeds_per_prompt_max": planned})
            keeps = plan.keeps_previews and where == "critical_path"
            plan = dataclasses.replace(plan, exploration=there, keeps_previews=keeps)
        by_id = {prompt.id: prompt for prompt in (*self.prompts.train, *self.prompts.test)}
        recorder = MemoryRecorder(Ranks(), by_id, self.config.evaluation.strict, trained)
        driver = BesideTraining(
            controller=Controller(plan, self.prompts.train, self.prompts.test),
            denoiser=self.denoiser,
            feed=self.learning.feed,
            rewards=self.rewards,
            recorder=recorder,
            clock=PhaseClock(Phase.IDLE, now_s=now_s),
            observer=Observer(),
            ranks=(alone := Ranks()),
            turn=MainTurn(alone),
            lease_size=self.config.rollout.batch_size,
            grid=(1, 1),
            training_pictures_every=0,
        )
        error = driver.run()
        if error is not None:
            raise RuntimeError(error)
        return recorder

    def weights(self) -> Weights:
        """A copy of those that rollouts use now."""
        state = self.learning.slots.state(self.denoiser.train_slot)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def scores(
        self,
        prompts: Sequence[Prompt],
        seeds: int,
        steps: int,
        weights: Weights,
        purpose: Purpose,
        iteration: int,
    ) -> dict[str, list[list[float]]]:
        """``reward``, and ``strict`` if there is such a curve, of every prompt's seeds under ``weights``:
        [prompts][seeds]; NaN where there is none."""
        self.learning.slots.load_state(self.denoiser.train_slot, weights)
        rollouts = [
            Rollout(
                RolloutId(f"p{slot:03d}-{member:03d}"),
                purpose,
                iteration,
                prompt.id,
                member,
                derive_seed(self.config.run_seed, "pool", slot, member),
                steps,
                PolicyVersion(iteration),
            )
            for slot, prompt in enumerate(prompts)
            for member in range(seeds)
        ]
        by_id = {prompt.id: prompt for prompt in prompts}
        results = self.denoiser.run(rollouts, lambda share: None)
        finished = [result for result in results if isinstance(result, FinishedRollout)]
        asked = [by_id[result.rollout.prompt_id] for result in finished]
        batch = self.rewards.score(
            [result.image for result in finished],
            [prompt.text for prompt in asked],
            [prompt.metadata for prompt in asked],
        )
        scores_of = {
            result.rollout.id: sample.curves()
            for result, sample in zip(finished, batch.samples, strict=True)
            if isinstance(sample, ScoredSample)
        }
        names = next(iter(scores_of.values()), {})
        kinds = {"reward": "reward", "strict": strict_curve(self.config.evaluation.strict, names)}
        scores: dict[str, list[list[float]]] = {}
        for kind, curve in kinds.items():
            if curve is not None:
                values = [scores_of[one.id][curve] if one.id in scores_of else math.nan for one in rollouts]
                scores[kind] = [values[start : start + seeds] for start in range(0, len(values), seeds)]
        return scores


@contextmanager
def laboratory(config: RunConfig) -> Iterator[Lab]:
    """Everything a run works with, at its start."""
    device = build.pick_device(config)
    prepare_process(device, config.deterministic)
    prompts = build.load_prompts(config)
    model = prepare_model(config, device)
    with build.make_reward_pool(config) as rewards:
        # Those of the iteration after the last, too: pools are made of them.
        used = prompts.used(config.model_copy(update={"iterations": config.iterations + 1}))
        rewards.check([prompt.text for prompt in used], [prompt.metadata for prompt in used])
        conditions = fill_embeddings(config, model, used, Ranks())
        learning = assemble(config, model, conditions, Ranks())
        engine = build.make_engine(config, model.family, learning.negative)
        slot, judged = model.algorithm.rollout_slot, config.evaluation.weights
        denoiser = Denoiser(engine, learning.slots, conditions, model.recipes, slot, judged)
        with torch.no_grad():
            learning.slots.state(slot)  # a missing slot shows here
        yield Lab(config, prompts, learning, denoiser, rewards)
