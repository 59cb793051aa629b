"""The checks of several processes: gradients at every ZeRO stage and with expert parallelism, and messages."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch

from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet, open_shards
from cdrmix.doctor.findings import (
    ENGINE_TOLERANCE,
    Finding,
    backward,
    configuration,
    loader,
    perturb,
    relative_error,
)
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import make_engine
from cdrmix.training.launch import launch

PROCESSES = (1, 2, 4, 8)  # divide the rows of the model, and divide its experts or are a multiple of them
MESSAGE = 1 << 24  # elements; 64 MiB


def check_processes(device: str, processes: int) -> list[Finding]:
    """Starts so many processes on this machine, which check the modes of training."""
    with tempfile.TemporaryDirectory(prefix="cdrmix-doctor-") as name:
        folder = Path(name)
        prepare(configuration(folder, device), say=lambda text: None)
        status, message = launch(processes, ["doctor", "--worker", name, "--device", device])
        results = folder / "findings.json"
        findings = [Finding(*each) for each in json.loads(results.read_text())] if results.exists() else []
        if status:
            remedy = "read the message; `cdrmix train --nproc` will fail alike"
            findings.append(Finding(f"{processes} processes", False, message or f"exit code {status}", remedy))
    return findings


def work(folder: Path, device: str) -> None:
    """The checks in one of the processes. The first writes the findings to the folder."""
    config = configuration(folder, device)
    world = join(config)
    shards = open_shards(prepare(config, say=lambda text: None).path)
    findings = [_messages(world)]
    for parallel in (1, min(world.size, config.cdrmix_model.feed_forward.experts)):
        findings += [_mode(folder, device, shards, world, stage, parallel) for stage in (0, 1, 2, 3)]
    if world.is_main_process:
        (folder / "findings.json").write_text(json.dumps(findings))


def _messages(world: DistributedContext) -> Finding:
    """The speed and the result of a sum over the processes."""
    seconds = []
    for _ in range(4):
        values = torch.full((MESSAGE,), float(world.rank + 1), device=world.device)
        world.barrier()
        started = time.perf_counter()
        last = world.total(values)[-1].item()
        seconds.append(time.perf_counter() - started)
    right = last == world.size * (world.size + 1) / 2
    found = f"{MESSAGE * 4 / 1e9 / min(seconds):.2f} GB/s, sums of {MESSAGE * 4 >> 20} MiB over {world.size} processes"
    return Finding("messages", right, found, "" if right else "the network changes data: try another one")


def _mode(folder: Path, device: str, shards: ShardSet, world: DistributedContext, stage: int, parallel: int) -> Finding:
    """The engine's gradients against plain PyTorch on the whole global batch."""
    settings = (f"train.zero_stage={stage}", f"train.expert_parallel={parallel}", "train.micro_batch_rows=1")
    config = configuration(folder, device, *settings)
    seed_everything(3)
    plain = build_loss_model(configuration(folder, device)).to(world.device)
    perturb(list(plain.parameters()))
    engine = make_engine(config, build_loss_model(config), world)
    engine.load_weights(plain.language_model.state_dict() if world.is_main_process else {})
    backward(plain, loader(config, shards).micro_batches(0), world.device)
    batches = loader(config, shards, world.rank, world.size).micro_batches(0)
    for batch in batches:
        engine.backward(engine.forward(batch, last=batch is batches[-1]).total)
    errors = {}
    for name, parameter in plain.language_model.named_parameters():
        assert parameter.grad is not None
        errors[name] = relative_error(engine.gradient(name), engine.part(name, parameter.grad))
    engine.zero()
    worst = max(((error, name) for each in world.gather(errors) for name, error in each.items()))
    check = f"ZeRO {stage}" + (f", experts over {parallel} processes" if parallel > 1 else "")
    passed = worst[0] < ENGINE_TOLERANCE
    remedy = "" if passed else "do not train in this mode; install the versions of constraints.txt"
    return Finding(check, passed, f"largest error of a gradient {worst[0]:.1e} ({worst[1]})", remedy)
