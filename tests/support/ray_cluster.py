"""A Ray cluster on this machine: a head without processors, and nodes of one each; with a token, as Ray 2.60 has it.

Starting takes seconds on a quick machine and a minute on a slow one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["STORE", "cluster_of", "environment"]

STORE = 80 * 2**20
_REPOSITORY = Path(__file__).parents[2]


@contextmanager
def environment(**more: str) -> Iterator[None]:
    """What Ray and its workers read from the environment: who may connect, patience, and where the tests lie."""
    paths = [str(_REPOSITORY / "src"), str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    given = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_gcs_server_request_timeout_seconds": "120",
        # A node that was removed is missed soon.
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def cluster_of(nodes: int, variables: Mapping[str, str] | None = None, **each: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Give the cluster and its nodes; `each` is what a node has besides one processor, `variables` the environment."""
    with environment(**(variables or {})):
        import ray
        from ray._raylet import AuthenticationTokenLoader, Config
        from ray.cluster_utils import Cluster

        # Ray reads both once for each process, which may have had another cluster before.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False},
        )
        try:
            given = {"num_cpus": 1, "object_store_memory": STORE, **each}
            made = [cluster.add_node(wait=False, **given) for _ in range(nodes)]
            cluster.wait_for_nodes(timeout=240)
            yield cluster, made
        finally:
            ray.shutdown()
            # Without grace, which takes seconds a node.
            for node in [*cluster.worker_nodes, cluster.head_node]:
                cluster.remove_node(node, allow_graceful=False)
