"""Tells Ray that a node will be preempted, so that it places nothing new there. Isolates a private Ray call.

Existing actors continue; Ray does not end the node at the deadline. A drain cannot be undone: after a
cancelled notice the node keeps its processes, but Ray places nothing new on it until it rejoins. No decision
here depends on the drain, so failures are only logged.
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
    """Announce a node's end to Ray. Never raises; False: Ray refused, and the log says why."""
    try:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, refusal = client.drain_node(
            ray_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            why,
            int((time.time() + remaining_s) * 1000),
            timeout=_ANSWER_S,
        )
    except Exception as error:  # noqa: BLE001 - a private call may fail in any way but must not end the run
        log.warning("Ray was not told that node %s will be taken: %r", ray_id[:12], error)
        return False
    if not accepted:
        log.warning("Ray does not drain node %s: %s", ray_id[:12], refusal)
    return bool(accepted)


def draining_nodes() -> dict[str, int]:
    """Ray ids of draining nodes, with deadlines in Unix ms. Raises what Ray raises."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    return dict(client.get_draining_nodes(timeout=_ANSWER_S))
