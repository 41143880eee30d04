"""Which machines have joined a Ray cluster: a program, since asking means joining.

python -m verl.cluster.nodes 10.0.0.1:6379        prints a JSON list of [host name, address, cores, devices]
"""

from __future__ import annotations

import json
import logging
import sys

import ray


def joined(address: str) -> list[tuple[str, str, int, int]]:
    """Return (host name, address, cores, devices) of every living node; ConnectionError without a cluster."""
    ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    try:
        return [
            (
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(joined(sys.argv[1])) + "\n")
