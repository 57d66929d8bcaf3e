"""Rounds of votes: how many of an iteration's groups people voted on, and which other rewards agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import permutations
from statistics import median

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.store_errors import LedgerError
from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import RunFolder
from spotlight_rewards.reward_config import REWARD

_SHOWN = 10
_SCORES = """
SELECT rollouts.iteration, rollouts.id, rewards.name, rewards.value
FROM rollouts LEFT JOIN rewards ON rewards.rollout = rollouts.id
WHERE rollouts.purpose = 'train'
    AND rollouts.iteration > (SELECT max(iteration) FROM rollouts) - ?
ORDER BY rollouts.seq
"""
Scores = Mapping[str, float]
"""Of a sample, by curve."""


def rounds(run: RunFolder) -> list[Json]:
    """The last iterations with votes, the newest first; empty without a ledger."""
    try:
        connection = run.open_ledger()
    except LedgerError:
        return []
    with closing(connection), queries.consistent_reading(connection):
        rows = connection.execute(_SCORES, (_SHOWN,)).fetchall()
        trained = {row[0] for row in connection.execute("SELECT DISTINCT iteration FROM optimizer_steps")}
    found: dict[int, dict[str, dict[str, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for iteration, rollout, name, value in rows:
        scores = found[iteration][rollout.rpartition("-")[0]].setdefault(rollout, {})
        if value is not None:
            scores[name] = value
    vote = vote_curve(run) or "vote"
    summaries = {
        at: summary(vote, [[*members.values()] for members in groups.values()])
        for at, groups in sorted(found.items(), reverse=True)
    }
    return [
        {"iteration": at, "trained": at in trained, **each} for at, each in summaries.items() if each["voted"]
    ]


def vote_curve(run: RunFolder) -> str | None:
    """The curve of the run's reward ``vote``; None: it has none."""
    rewards = run.settings().tree.get("rewards")
    found = [each for each in rewards if isinstance(each, dict)] if isinstance(rewards, list) else []
    return next((str(each.get("label") or "vote") for each in found if each.get("name") == "vote"), None)


def summary(vote: str, groups: Sequence[Sequence[Scores]]) -> Json:
    """Of an iteration's groups, each the scores of its members; ``vote`` is the curve of the votes.

    ``pairs`` are two pictures of which people placed one before the other; ``agree`` is the share of them
    that another reward scores in the same order, equal scores counting half.
    """
    voted = [
        [scores for scores in group if vote in scores]
        for group in groups
        if any(vote in scores for scores in group)
    ]
    pairs = [
        (better, worse)
        for group in voted
        for better, worse in permutations(group, 2)
        if better[vote] > worse[vote]
    ]
    names = dict.fromkeys(name for pair in pairs for scores in pair for name in scores)
    others = [name for name in names if "/" not in name and name not in (vote, REWARD)]
    took_s = [group[0][f"{vote}/vote_s"] for group in voted if f"{vote}/vote_s" in group[0]]
    return {
        "groups": len(groups),
        "voted": len(voted),
        "undecided": sum(all(scores[vote] == 0.5 for scores in group) for group in voted),
        "vote_s": median(took_s) if took_s else None,
        "pairs": len(pairs),
        "agree": {name: share for name in others if (share := _agreement(name, pairs)) is not None},
    }


def _agreement(name: str, pairs: Sequence[tuple[Scores, Scores]]) -> float | None:
    both = [(better[name], worse[name]) for better, worse in pairs if name in better and name in worse]
    if not both:
        return None
    return sum((better > worse) + (better == worse) / 2 for better, worse in both) / len(both)
