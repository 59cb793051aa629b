"""As a program, `measure_worker.py YAML OVERRIDE...`: trains two steps and prints the most bytes its tensors took.

PyTorch's profiler is told of every allocation of a CPU's tensors, within operators too; what numba and Python take is
not among them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.train.build import build_loss_model
from cdrmix.train.engine import accumulation, make_engine
from cdrmix.train.parallel import World, join

STEPS = 2  # the first makes the optimizer's state, the second has it beside the activations


def train(config: Config, world: World) -> None:
    engine = make_engine(config, build_loss_model(config), world)
    rows, length = config.train.micro_batch_rows, config.data.row_length
    documents = torch.arange(0, rows * length + 1, length // 2, dtype=torch.int32)
    for step in range(STEPS):
        count = accumulation(config, world)
        for number in range(count):
            ids = torch.randint(0, config.model.vocab_size, (rows, length))
            batch = Batch(ids, ids, torch.ones(rows, length), documents, step, float(count * rows * length))
            engine.backward(engine.forward(batch, last=number == count - 1).total)
        engine.set_learning_rate(1e-3)
        engine.clip()
        engine.step()
        engine.zero()


def main() -> None:
    config = load_config(Path(sys.argv[1]), sys.argv[2:])
    world = join(config)
    train(config, world)  # compiles, which allocates too
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(config, world)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    print(f"measured {most}")


if __name__ == "__main__":
    main()
