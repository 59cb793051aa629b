"""As a program, `measure_worker.py YAML OVERRIDE...`: trains two steps and prints the most bytes that the second took.

Weights and optimizer state, and by how much the step raised this process's resident memory at its highest, as the
kernel counts it. The environment has to say MALLOC_MMAP_THRESHOLD_=65536, so that memory goes back as soon as a tensor
is freed. PyTorch's profiler will not do: it is not told of every tensor that is freed, and so counted between 117 and
146 MB for one and the same step.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.training.build import build_loss_model
from cdrmix.training.deepspeed_config import accumulation
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine


def step(config: Config, world: DistributedContext, engine: Engine, number: int) -> None:
    rows, length, count = config.train.micro_batch_rows, config.data.row_length, accumulation(config, world)
    documents = torch.arange(0, rows * length + 1, length // 2, dtype=torch.int32)
    for micro_batch in range(count):
        ids = torch.randint(0, config.model.vocab_size, (rows, length))
        batch = Batch(ids, ids, torch.ones(rows, length), documents, number, float(count * rows * length))
        engine.backward(engine.forward(batch, last=micro_batch == count - 1).total)
    engine.set_learning_rate(1e-3)
    engine.clip()
    engine.step()
    engine.zero()


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process: bytes of its memory in use, now or at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    config = Config.from_yaml(Path(sys.argv[1]), sys.argv[2:])
    world = join(config)
    torch.manual_seed(1)  # what the routers choose decides how many rows an expert has
    engine = make_engine(config, build_loss_model(config), world)
    step(config, world, engine, 0)  # compiles, and makes the optimizer's state
    gc.collect()
    weights = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    state = [value for slots in engine.optimizer.state.values() for value in slots.values()]
    there = sum(tensor.untyped_storage().nbytes() for tensor in [*weights, *state])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from here on
    step(config, world, engine, 1)
    most = there + resident("VmHWM") - before
    print(f"measured {most}")


if __name__ == "__main__":
    main()
