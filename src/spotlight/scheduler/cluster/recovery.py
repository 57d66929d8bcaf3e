"""Named recovery paths of the controller, counted when taken.

The simulation's check fails if some path was never taken: it would be untested.
"""

from __future__ import annotations

from enum import StrEnum


class Recovery(StrEnum):
    """A branch that a fault-free run never enters."""

    NODE_LOST = "node_lost"
    NODE_RETURNED = "node_returned"
    NODE_DRAINED = "node_drained"
    NOTICE_CANCELLED = "notice_cancelled"
    COMMAND_RESENT = "command_resent"
    WORKER_CRASHED = "worker_crashed"
    WORKER_RESTARTED = "worker_restarted"
    GROUP_LOST_MEMBER = "group_lost_member"
    FORMED_BY_PULL = "formed_by_pull"
    ANSWER_STALE = "answer_stale"
    PULL_STALE_LINEAGE = "pull_stale_lineage"
    PULL_FAILED = "pull_failed"
    PULL_LOST_PEER = "pull_lost_peer"
    GRANT_RESENT = "grant_resent"
    LEASE_RENOUNCED = "lease_renounced"
    LEASE_EXPIRED = "lease_expired"
    LEASE_ABANDONED = "lease_abandoned"
    COMMIT_STALE = "commit_stale"
    COMMIT_DUPLICATE = "commit_duplicate"
    RESUMED = "resumed"
    TAIL_REFORMED = "tail_reformed"
    TAIL_ENDED = "tail_ended"
    LEARNER_LOST = "learner_lost"
    LEARNER_AWAITED = "learner_awaited"
    LEARNER_MOVED = "learner_moved"
    LEARNER_EVICTED = "learner_evicted"
    LEARNER_RESIZED = "learner_resized"
    NODE_REASSIGNED = "node_reassigned"
    TRAINED_AGAIN = "trained_again"
    SAMPLE_KEPT = "sample_kept"
    PROGRESS_KEPT = "progress_kept"
    SCORE_STALE = "score_stale"
    ROLLOUT_RENEWED = "rollout_renewed"
    PREVIEW_DROPPED = "preview_dropped"
    PREVIEWS_YIELDED = "previews_yielded"
