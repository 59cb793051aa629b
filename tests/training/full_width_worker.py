"""One of the processes that divide a released model of full width, told by a JSON argument: what its share takes."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.training.distributed import join
from cdrmix.training.launch import exit_worker
from cdrmix.training.tensor_groups import TensorGroups


def resident(name: str) -> int:
    """VmRSS, the memory that the process has, or VmHWM, the most that it had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main(order: dict[str, Any]) -> int:
    """Writes to `where` the bytes of the parameters of each process, and what their construction takes at most."""
    config = Config.from_yaml(order["config"], order["overrides"])
    world = join(config)
    shares = TensorGroups.make(config)
    with Path(order["where"]).with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one after another: together they need more than 24 GiB
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        torch.manual_seed(config.run.seed)
        model = LanguageModel(config.cdrmix_model, tensor=shares)
        most = resident("VmHWM") - before
        held = sum(parameter.nbytes for parameter in model.parameters())
        elements = sum(parameter.numel() for parameter in model.parameters())
        router = model.blocks[0].feed_forward.router.weight.detach().double().sum().item()
        experts = model.blocks[0].feed_forward.w_up.detach().flatten()[:1000].double().sum().item()
        del model
    facts = world.gather(
        {"held": held, "most": most, "elements": elements, "router": router, "experts": experts}, "the test"
    )
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
