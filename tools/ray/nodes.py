"""Two Ray nodes on this machine: `nodes CORES`; each line `again` replaces the second one.

Runs in the environment of Ray (`make ray`), in a network namespace that has the loopback alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

STORE_BYTES = 100 * 2**20
PREFIX = "node "
"""Of the line that says that both run."""


def node(cluster: Any, cores: int, **more: Any) -> Any:
    return cluster.add_node(
        num_cpus=cores, object_store_memory=STORE_BYTES, node_ip_address="127.0.0.1", **more
    )


def raylet(one: Any) -> int:
    """Process id of what manages a node; all of the node's other processes descend from it."""
    return next(int(process.pid) for kind, process in one.live_processes() if kind == "raylet")


def main(cores: int) -> None:
    """Start both nodes and give the second one's process; for each line start another in its place."""
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # noqa: S108 - Ray's own
    cluster = Cluster()
    node(cluster, cores, include_dashboard=True, dashboard_port=8265)
    while True:
        worker = node(cluster, cores)
        cluster.wait_for_nodes()
        print(f"{PREFIX}{raylet(worker)}", flush=True)
        if sys.stdin.readline() != "again\n":
            break
        cluster.remove_node(worker, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
