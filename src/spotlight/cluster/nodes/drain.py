"""Tells Ray that a node will be taken, so that it places nothing new there: the user of its private call.

Existing actors go on; Ray does not end the node at the deadline, and calls the deaths that follow
preemptions. There is no way back: a node whose notice is cancelled keeps what runs on it, and gets nothing
new from Ray until it has joined anew. None of this decides anything of ours, so a failure is logged and
that is all.
"""

from __future__ import annotations

import logging
import time

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined] # its stubs lack them
from ray.core.generated import autoscaler_pb2

log = logging.getLogger("spotlight.cluster.nodes.drain")

_ANSWER_S = 5.0


def drain_node(ray_id: str, remaining_s: float, why: str) -> bool:
    """Announce the end of a node. Never raises; False: Ray did not take it, and the log says why.

    Args:
        remaining_s: until the node is taken.
        why: for people.
    """
    try:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(
            ray_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            why,
            int((time.time() + remaining_s) * 1000),
            timeout=_ANSWER_S,
        )
    except Exception as error:  # noqa: BLE001 - a private call may fail in any way, and must not end a run
        log.warning("Ray was not told that node %s will be taken: %r", ray_id[:12], error)
        return False
    if not accepted:
        log.warning("Ray does not drain node %s: %s", ray_id[:12], refusal)
    return bool(accepted)


def draining_nodes() -> dict[str, int]:
    """Ray's ids of the nodes being drained, and their deadlines in ms since 1970. Raises what Ray raises."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    return dict(client.get_draining_nodes(timeout=_ANSWER_S))
