"""As a program, `measure_worker.py YAML PHASE OVERRIDE...`: trains two steps and prints the most bytes of the second.
PHASE: of stage B; "" is stage A.

Weights and optimizer state, and by how much the step raised this process's resident memory at its highest, as the
kernel counts it. The environment has to say MALLOC_MMAP_THRESHOLD_=65536, so that memory goes back as soon as a tensor
is freed. PyTorch's profiler will not do: it is not told of every tensor that is freed, and so counted between 117 and
146 MB for one and the same step.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from pathlib import Path

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.reason.build import build_model, make_phase
from cdrmix.reason.phase import PhaseObjective, freeze, phase_config
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


def phase_step(engine: Engine, objective: PhaseObjective, number: int) -> None:
    for outcome in engine.passes(objective.micro_batches(engine, number), objective.forward):
        del outcome
    engine.set_learning_rate(1e-3)
    engine.clip()
    engine.step()
    engine.zero()


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process: bytes of its memory in use, now or at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    config = Config.from_yaml(Path(sys.argv[1]), sys.argv[3:])
    world = join(config)
    torch.manual_seed(1)  # what the routers choose decides how many rows an expert has
    if name := sys.argv[2]:
        model, phase = build_model(config), make_phase(name, config, None)
        with torch.no_grad():  # an untrained model gives all tokens one probability, and all groups are dropped
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        freeze(model, phase)
        objective = PhaseObjective(phase, model, world)
        engine = make_engine(phase_config(config, getattr(config.reasoning.phases, name)), model, world)
        take_step = functools.partial(phase_step, engine, objective)
    else:
        engine = make_engine(config, build_loss_model(config), world)
        take_step = functools.partial(step, config, world, engine)
    take_step(0)  # compiles, and makes the optimizer's state
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    weights = list(engine.parameters.values())
    state = [value for slots in engine.optimizer.state.values() for value in slots.values()]
    there = sum(tensor.untyped_storage().nbytes() for tensor in [*weights, *state])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from here on
    take_step(1)
    most = there + resident("VmHWM") - before
    print(f"measured {most}")


if __name__ == "__main__":
    main()
