"""The keeper as a Ray actor: one process on a reserved node, which is asked by name of method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from spotlight.cluster.blobs.blob_store import Vault
from spotlight.cluster.blobs.keeper import KeeperRoom

if TYPE_CHECKING:
    from ray.actor import ActorHandle

CONCURRENT_CALLS = 10_000
"""Of a call that waits (for the head, for room) only a coroutine is held; the next one must still come in."""


class KeeperActor(KeeperRoom):
    """A room with a vault of its own.

    Args:
        directory: for values on disk, on the keeper's node.
        memory_bytes: the most that values take in memory.

    Raises:
        StoreError: the directory cannot be used.
    """

    def __init__(self, directory: str, memory_bytes: int) -> None:
        super().__init__(Vault(Path(directory), memory_bytes))


def start_keeper(directory: Path, memory_bytes: int, *, node: str) -> ActorHandle[Any]:
    """Start the keeper; it ends with the process that started it, or by ``ray.kill``.

    The call returns at once: an error of the keeper's start (a directory that cannot be used) is that of the
    first call.

    Args:
        node: Ray's id of the node it runs on.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(KeeperActor).options(
        num_cpus=0,
        max_restarts=0,  # one that starts anew is empty: whoever trusts it must hear of its death
        max_task_retries=0,
        max_concurrency=CONCURRENT_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return cast("ActorHandle[Any]", actor.remote(str(directory), memory_bytes))
