"""A Ray of one node on this machine, for a test that needs no cluster of ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import mkdtemp


@contextmanager
def own_ray(cpus: int, resources: Mapping[str, float] | None = None) -> Iterator[str]:
    """Yields the node's id. Ray's own files are gone afterwards."""
    import ray

    directory = mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray's socket paths are limited
    try:
        ray.init(
            num_cpus=cpus,
            resources=resources,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="WARNING",
            _temp_dir=directory,
            _node_ip_address="127.0.0.1",
        )
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
