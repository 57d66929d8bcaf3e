"""Names of the metrics that the page reads from a run's ``metrics.jsonl``, as the trainer writes them."""

from __future__ import annotations

from spotlight.store.metrics import GRADED, VALIDATION

REWARD = "rollout/reward"
LOSS = "train/loss"
GRADIENT = "train/grad_rms_over_epsilon"
CLIPPED_SHARE = "train/clip_fraction"
SILENT_GROUPS_SHARE = "advantage/silent_groups_share"
ROLLOUT_MFU = "throughput/rollout_mfu"
TRAIN_MFU = "throughput/train_mfu"
NODES_ASKED = "target/nodes_asked"
REACHABLE = "target/reachable"
VALIDATION_GRADED = f"{VALIDATION}{GRADED}"
