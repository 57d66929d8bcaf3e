"""Ray's books have room for a rank and a worker on each GPU, in whatever order they come back after deaths.

Which GPU Ray means by a share is another matter (it fills up one first): see ``ALL_GPUS_VISIBLE``. The GPUs
here are numbers in Ray's books.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spotlight.cluster.nodes.listing import SHARE
from spotlight.cluster.workers.worker_actor import WorkerPlacement
from spotlight.scheduler.effects import StartWorker
from spotlight.scheduler.types import NodeId, WorkerId

SCRIPT = """
import json, random, sys, time
from spotlight_fleet.emulated.node_processes import prepare_environment
prepare_environment()
import ray
share = float(sys.argv[1])
ray.init(num_gpus=3, num_cpus=0, include_dashboard=False, log_to_driver=False,
         _node_ip_address="127.0.0.1", object_store_memory=80 << 20)

class Process:
    def gpus(self):
        return len(ray.get_gpu_ids())

shares = {"rank 0": share, "rank 1": share, "worker 0": share, "worker 1": share, "worker 2": 1.0}
alive, dice = {}, random.Random(0)
for _ in range(2):
    coming = [name for name in shares if name not in alive]
    dice.shuffle(coming)
    for name in coming:
        alive[name] = ray.remote(Process).options(num_cpus=0, num_gpus=shares[name]).remote()
    assert ray.get([actor.gpus.remote() for actor in alive.values()], timeout=120) == [1] * 5
    for name in dice.sample(sorted(alive), 3):
        ray.kill(alive.pop(name))
    # Until Ray has seen it: what is placed before goes to another GPU, and two halves hold no whole worker.
    free = 3 - sum(shares[name] for name in alive)
    while ray.available_resources().get("GPU", 0.0) < free:
        time.sleep(0.05)
print(json.dumps("all had room"))
ray.shutdown()
"""


@pytest.mark.slow  # of Ray's version alone, and it starts a Ray
def test_shares_of_all_slots_fit_in_any_order() -> None:
    command = [sys.executable, "-c", SCRIPT, str(SHARE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == "all had room"


def test_a_worker_beside_a_rank_has_the_rank_s_number() -> None:
    """Ranks of a node take its first GPUs, in order; so do the workers beside them; the others follow."""
    beside = WorkerPlacement("ray id", True, None, SHARE, 0)
    others = WorkerPlacement("ray id", True, None, 1.0, 2)
    by_ray = WorkerPlacement("ray id", True, None)
    numbers = [
        placement.number_of(StartWorker(WorkerId(f"n/{gpu}"), NodeId("n"), gpu, 1))
        for placement, gpu in ((beside, 0), (beside, 1), (others, 0), (by_ray, 0))
    ]
    assert numbers == [0, 1, 2, None]
