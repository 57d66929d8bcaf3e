"""How long one iteration lasts while the same nodes stay, and what its previews bring. Pure.

It rolls out in ``fixed_s + work_s / workers``
(:class:`~spotlight.scheduler.policies.target.iteration_model.AmdahlTime`), waits for its last reward, and
trains; with parts of the pipeline the longer of both hides most of the other. A learner on spot nodes that
loses one trains its iteration again, and the longer an iteration is trained, the more often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from spotlight.scheduler.policies.target.iteration_model import AmdahlTime
from spotlight.scheduler.types import WeightKind
from spotlight_plan.learning_speed import Explored
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.side_costs import egress_of
from spotlight_plan.scenarios.strategies import PipelinePart, Strategy
from spotlight_plan.scenarios.strategy_scenario import terms_of
from spotlight_plan.simulation.virtual_rewards import RewardModel

_TAIL = 0.3
"""Of a lease's time, how long workers wait for the last one where leases divide among them evenly.

This and the next one are fitted by hand to the pairs of ``benchmarks.plan_ranking``, so that its errors are
not those on other scenarios.
"""
_TAIL_OVERLAPPED = 0.75
"""The same with any number of leases, where training begins before the last."""
_HOPELESS = 50.0
"""More losses per training than this count as this many, so that nothing overflows; and of so many attempts
at an iteration's rollouts at least one is without a loss."""
_LEFT_OUT = 0.35
"""Of what a subset leaves out, so much was left out before a loss, in the mean: groups are complete late.

Fitted by hand to one of the ten pairs of ``benchmarks.plan_ranking`` on ``video-1000``, so that their errors
are not those on other scenarios.
"""
_OVERLAPS = frozenset({PipelinePart.GAP, PipelinePart.SLICES})
_TRAINERS_HELP = frozenset({PipelinePart.TAG, PipelinePart.STEAL})
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class IterationPace:
    """Iterations while the same nodes stay.

    Attributes:
        seconds: of one; infinite where nothing rolls out or trains.
        first_s: of the first, from the start of the processes.
        previews: share of the wanted ones; NaN: the strategy does not explore.
        explored: what they bring; None: nothing.
        crossing_usd: bytes to and from spot nodes in another region, of one iteration.
    """

    seconds: float
    first_s: float
    previews: float = math.nan
    explored: Explored | None = None
    crossing_usd: float = 0.0


class IterationForm:
    """Of one cluster and strategy; see the module's docstring.

    Raises:
        ConfigError: as :func:`~spotlight_plan.scenarios.strategy_scenario.terms_of`.
    """

    def __init__(self, prepared: Prepared, strategy: Strategy) -> None:
        self._strategy, self._file = strategy, prepared.file.run_as(strategy)
        terms = terms_of(prepared, strategy)
        self._costs, self.plan, self.boot_s = terms.costs, terms.plan, terms.boot_s
        self._egress = egress_of(self._file, prepared.profile, prepared.pricing, strategy)
        self._lease, self._sample_s = cache(self._leases), cache(self._samples_s)  # asked for at every pace

    def pace(self, nodes: int, losses_s: float, notice_s: float) -> IterationPace:
        """With so many nodes in the places of spot nodes.

        Args:
            losses_s: how often a second a learner on spot nodes loses one.
            notice_s: ahead of that.
        """
        workers, apart = self._workers(nodes)
        if workers <= 0 or nodes < self.learner_nodes:
            return IterationPace(math.inf, math.inf, previews=0.0)
        costs, gpu = self._costs, self._rolling_type(nodes)
        sample_s, lease = self._sample_s(gpu, self.plan.rollout_steps), self._lease(gpu)
        scored_s, train_s = costs.reward_s(lease), self._training_s
        waves = self._samples / (workers * lease)
        overlaps = bool(self._strategy.parts & _OVERLAPS)
        tail = _TAIL_OVERLAPPED if overlaps else _TAIL + math.ceil(waves - 1e-9) - waves
        rolled = AmdahlTime(tail * sample_s * lease, self._samples * sample_s)
        if overlaps:
            seconds = self._overlapped(rolled, workers, apart, lease)
            idle_s = max(0.0, apart * seconds - rolled.work_s)
        else:
            idle_s = apart * (train_s + self._publish_s + scored_s + rolled.fixed_s)
            # What began early was rolled out while the learner trained.
            begun_s = min(self.early * rolled.work_s, idle_s)
            rolls_s = self._rolls_s(rolled, workers, apart) - begun_s / workers
            seconds = max(rolls_s, self._samples * costs.scoring_s(1) + scored_s) + scored_s + train_s
            idle_s -= begun_s
        previews, explored, wait_s = self._explored(gpu, workers, apart, idle_s)
        if losses_s:
            rolls_s = rolled.work_s / workers
            seconds += self._again_s(seconds, sample_s * lease, rolls_s, losses_s, notice_s)
        seconds += wait_s + self._publish_s + self._saves_s
        judged_s, every = self._evaluated_samples_s(gpu) / workers, self.plan.evaluation.every
        return IterationPace(
            seconds + (judged_s / every if every else 0.0),
            max(self.starts_s, costs.restore_s()) + seconds + judged_s,
            previews,
            explored,
            self._crossing_usd(nodes, workers),
        )

    def _again_s(self, seconds: float, lease_s: float, rolls_s: float, rate: float, notice_s: float) -> float:
        """What an iteration takes longer because its learner loses nodes.

        It trains anew in another place. To come through ``exposed_s`` without a loss takes
        (e ** (rate * exposed_s) - 1) / rate, and the first factor is how often it fails. A loss that is
        announced so late in training that it ends before does no harm, and a second learner is formed
        meanwhile. Samples are kept, but for those that a subset left out, and workers repeat steps since
        their last commit.

        Args:
            lease_s: of a worker.
            rolls_s: all workers' for the iteration's samples.
        """
        costs, plan = self._costs, self.plan
        ready_s = max(notice_s - plan.cluster.drain_margin_s, costs.restore_s())
        exposed_s = max(0.0, self._training_s - min(notice_s, ready_s))
        failed = math.expm1(min(rate * exposed_s, _HOPELESS))
        left_s = (1 - plan.trained_share) * rolls_s
        repeated_s = self._file.run.commit_every / 2 / plan.rollout_steps * lease_s
        if self._strategy.parts & _OVERLAPS:  # made again while the learner trains again
            left_s, repeated_s = 0.0, repeated_s + _LEFT_OUT * left_s
        trained_s = failed / rate - exposed_s + failed * (ready_s + left_s)
        share = min(rate * repeated_s, 1 - 1 / _HOPELESS)
        return trained_s + max(0.0, seconds - self._training_s) * share / (1 - share)

    def _rolls_s(self, rolled: AmdahlTime, workers: float, apart: float) -> float:
        """Rolling out alone; trainers take part, but with ``tag`` only where that ends sooner."""
        together_s = rolled.seconds(workers) + (2 * self._costs.switch_s() if workers > apart else 0.0)
        return (
            min(together_s, rolled.seconds(apart)) if PipelinePart.TAG in self._strategy.parts else together_s
        )

    def _overlapped(self, rolled: AmdahlTime, workers: float, apart: float, lease: int) -> float:
        """Rolling out and training at once: the longer, and what of the other it cannot hide.

        Samples come in waves of one lease for each GPU. The first is waited for, unless it began early, and
        the last is trained alone.
        """
        train_s, helps = self._training_s, self._strategy.parts & _TRAINERS_HELP
        gpus = apart if helps else workers
        wave, alone_s = min(1.0, gpus * lease / self._samples), math.inf
        if gpus > 0:
            first_s = wave * rolled.work_s / gpus + self._costs.scoring_s(self.plan.micro_batch_size)
            first_s = 0.0 if self.early else first_s + self._costs.reward_s(lease)
            alone_s = max(rolled.seconds(gpus) + wave * train_s, first_s + train_s)
        if not helps:
            return alone_s
        # Both kinds of work are divided among all, and trainers switch once each way.
        turned_s = train_s + 2 * self._costs.switch_s()
        together_s = (rolled.work_s + (workers - apart) * turned_s) / workers
        tail_s = rolled.fixed_s + min(1.0, workers * lease / self._samples) * train_s / 2
        return min(alone_s, max(together_s, train_s) + (0.0 if self.early else tail_s))

    def _explored(
        self, gpu: str, workers: float, apart: float, idle_s: float
    ) -> tuple[float, Explored | None, float]:
        """Share of previews made, what they bring, and seconds that the iteration waits for them.

        Args:
            idle_s: GPU-seconds of workers apart from the learner.
        """
        plan = self.plan
        if plan.exploration is None:
            return math.nan, None, 0.0
        (seeds, steps), lease = self._arm, self._lease(gpu)
        groups = plan.prompts_per_iteration - plan.early_groups
        preview_s, planned = self._sample_s(gpu, steps), groups * seeds
        late_s = preview_s * lease / 2 + self._costs.reward_s(lease)
        if plan.exploration.where == "critical_path":
            explored = Explored(self._contrast(seeds, steps, stale=False), 1.0)
            return 1.0, explored, planned * preview_s / workers + late_s
        made = max(0.0, idle_s - apart * late_s) / preview_s
        share, pool = min(1.0, made / planned), min(made / groups, plan.pool_max or seeds)
        covered = groups / plan.prompts_per_iteration
        if pool < plan.group_size:  # of some groups all, of the others none
            pool, covered = seeds, share * covered
        explored = Explored(self._contrast(pool, steps, stale=True), covered)
        return share, explored if share else None, 0.0

    def _contrast(self, pool: float, steps: int, *, stale: bool) -> float:
        """Of a group chosen among so many previews, over that of a random group."""
        assert self._file.exploration is not None, "asked for only where previews are made"
        model = RewardModel(**self._file.exploration.rewards.model_dump())
        rho = model.correlation(steps, self.plan.rollout_steps, stale=stale)
        return 1 + rho * rho * (chosen_variance(self.plan.group_size, max(pool, self.plan.group_size)) - 1)

    def _workers(self, nodes: int) -> tuple[float, float]:
        """GPUs that roll out, and those of them that never train; in GPUs of :meth:`_rolling_type`."""
        pools, ranks = self._file.cluster, self.plan.ranks
        spot, reserved = nodes * pools.spot.gpus_per_node, pools.reserved.nodes * pools.reserved.gpus_per_node
        both = self._strategy.trainers_roll_out(pools.reserved.rolls_out)
        if self._strategy.is_all_spot:
            return (spot if both else spot - ranks), max(0, spot - ranks)
        steps = self.plan.rollout_steps
        speed = (
            self._sample_s(self._rolling_type(nodes), steps) / self._sample_s(pools.reserved.gpu_type, steps)
            if both
            else 0.0
        )
        return spot + speed * reserved, max(0, spot + reserved - ranks)

    def _rolling_type(self, nodes: int) -> str:
        return self._file.cluster.spot.gpu_type if nodes else self._file.cluster.reserved.gpu_type

    def _leases(self, gpu: str) -> int:
        return self._costs.lease_size(gpu, self._file.pixels, 1)

    def _samples_s(self, gpu: str, steps: int) -> float:
        """GPU-seconds of a sample of so many steps, in a full lease."""
        lease, pixels = self._lease(gpu), self._file.pixels
        step_s = self._costs.denoise_step_s(gpu, pixels, lease, 1)
        return (steps * step_s + self._costs.decode_s(gpu, pixels, lease)) / lease

    @property
    def _samples(self) -> int:
        return self.plan.prompts_per_iteration * self.plan.group_size

    @property
    def _arm(self) -> tuple[int, int]:
        """Previews per prompt and steps of each, the fewest that a planner may choose; 0: none."""
        explores = self.plan.exploration
        if explores is None:
            return 0, 0
        seeds, steps = explores.arms(self.plan.group_size, self.plan.rollout_steps)
        return min(seeds), min(steps)

    @property
    def early(self) -> float:
        """Share of the groups that begin before their iteration."""
        return self.plan.early_groups / self.plan.prompts_per_iteration

    @property
    def learner_nodes(self) -> int:
        """Spot nodes that the learner is on."""
        return self._file.spot_nodes(self._strategy) - self._file.cluster.spot.nodes

    @cached_property
    def _training_s(self) -> float:
        """All that the learner does in an iteration but publishing."""
        costs, plan = self._costs, self.plan
        gpu, samples = self._file.learner_gpu(self._strategy), self._file.samples
        whole, rest = divmod(samples, plan.micro_batch_size)
        sizes = [(plan.micro_batch_size, whole), (rest - rest % plan.ranks, 1)]
        trained = (costs.train_s(gpu, self._file.pixels, size, plan.ranks) * count for size, count in sizes)
        return (
            costs.prepare_s(samples, plan.ranks) + sum(trained) + plan.updates_per_batch * costs.optimizer_s()
        )

    @cached_property
    def _publish_s(self) -> float:
        """Until all workers have the new version: one from the store, the others of its node from it."""
        kind, costs = self.plan.cluster.publishes, self._costs
        far_s = self._egress.weight_bytes[kind] / self._egress.bytes_s if self._egress else 0.0
        return costs.publish_s(kind) + max(costs.pull_s(kind, False), far_s) + costs.pull_s(kind, True)

    @cached_property
    def starts_s(self) -> float:
        """Of a worker, with the whole model."""
        kind, costs = WeightKind.FULL, self._costs
        far_s = self._egress.weight_bytes[kind] / self._egress.bytes_s if self._egress else 0.0
        return costs.worker_start_s() + max(costs.pull_s(kind, False), far_s) + costs.pull_s(kind, True) / 2

    @property
    def _saves_s(self) -> float:
        """Of an iteration's share of a checkpoint, unless the next one does not wait for it."""
        behind = self.plan.cluster.learner_moves
        return 0.0 if behind else self._costs.checkpoint_s() / self.plan.checkpoint_every

    def _evaluated_samples_s(self, gpu: str) -> float:
        """GPU-seconds of an evaluation."""
        test = self._file.workload.evaluation
        return test.prompts * test.images_per_prompt * self._sample_s(gpu, test.steps) if test else 0.0

    def _crossing_usd(self, nodes: int, workers: float) -> float:
        """A version to every spot node, and their share of the samples and previews back."""
        crossing, plan = self._egress, self.plan
        if crossing is None:
            return 0.0
        share = nodes * self._file.cluster.spot.gpus_per_node / workers
        previews = plan.prompts_per_iteration * self._arm[0]
        sent = share * self._samples * crossing.sample_bytes + previews * crossing.picture_bytes
        pulled = nodes * crossing.weight_bytes[plan.cluster.publishes]
        return (pulled * crossing.to_spot_usd_gb + sent * crossing.from_spot_usd_gb) / 1e9


@cache
def chosen_variance(count: int, pool: float) -> float:
    """Of half the highest and half the lowest of ``pool`` normal samples, over that of any ``count``."""
    return _variance_by_rank(count, pool) / _variance_by_rank(count, count)


def _variance_by_rank(count: int, pool: float) -> float:
    high, low = count - count // 2, count // 2
    ranks: list[float] = [*range(1, low + 1), *(pool + 1 - rank for rank in range(1, high + 1))]
    places = [(rank - 0.375) / (pool + 0.25) for rank in ranks]  # Blom's expected order statistics
    values = [_NORMAL.inv_cdf(place) for place in places]
    densities = [_NORMAL.pdf(value) for value in values]
    around = (
        place * (1 - place) / ((pool + 2) * density * density)
        for place, density in zip(places, densities, strict=True)
    )
    mean = sum(values) / count
    between: float = sum((value - mean) * (value - mean) for value in values)
    return (between + sum(around)) / (count - 1)
