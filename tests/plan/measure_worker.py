"""As a program, `measure_worker.py YAML OVERRIDE...`: trains two steps and prints the most bytes its tensors took.

Those that the second step allocates, on top of weights and optimizer state. PyTorch's profiler is told of every
allocation of a CPU's tensors, within operators too; what numba and Python take is not among them.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.train.build import build_loss_model
from cdrmix.train.engine import Engine, accumulation, make_engine
from cdrmix.train.parallel import World, join


def step(config: Config, world: World, engine: Engine, number: int) -> None:
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


def main() -> None:
    config = load_config(Path(sys.argv[1]), sys.argv[2:])
    world = join(config)
    engine = make_engine(config, build_loss_model(config), world)
    step(config, world, engine, 0)  # compiles, and makes the optimizer's state
    gc.collect()
    weights = [parameter for group in engine.adamw.param_groups for parameter in group["params"]]
    state = [value for slots in engine.adamw.state.values() for value in slots.values()]
    there = sum(tensor.untyped_storage().nbytes() for tensor in [*weights, *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(config, world, engine, 1)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = there
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    print(f"measured {most}")


if __name__ == "__main__":
    main()
