"""One process of a training whose memory is limited, told by a JSON argument: it trains in the run folder `where`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from worker import train

from cdrmix.config.schema import Config
from cdrmix.training import build, deepspeed_config
from cdrmix.training.distributed import join
from cdrmix.training.launch import exit_worker


# In proportion to the model, whose blocks have 9 million elements.
deepspeed_config.BUCKET = deepspeed_config.MOST_LIVE = 10_000_000


def writable() -> int:
    """Bytes of memory that count for RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def main(order: dict[str, Any]) -> int:
    """limit: bytes of memory besides those of the process before it has a model. whole: make the model whole."""
    if "whole" in order:
        build.sharding = lambda config: None
    join(Config.from_yaml(order["config"], order["overrides"]))
    limit = writable() + int(order["limit"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    status = train(order)
    memory = Path("/proc/self/status").read_text(encoding="utf-8")
    print([line for line in memory.splitlines() if line.startswith(("VmHWM", "VmData"))], limit >> 20)
    return status


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
