"""The checks of several processes: ZeRO stages and every kind of parallelism against plain PyTorch; messages."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from cdrmix.data.prepare import prepare
from cdrmix.data.shards import open_shards
from cdrmix.doctor.findings import Finding, configuration
from cdrmix.doctor.gradients import engine
from cdrmix.json_text import parse_json
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.launch import launch

PROCESSES = (1, 2, 4, 8)  # divide the rows of the model and its heads, and divide its experts or are a multiple of them
MESSAGE = 1 << 24  # elements; 64 MiB


def check_processes(device: str, processes: int) -> list[Finding]:
    """Starts so many processes on this machine, which check the modes of training."""
    with tempfile.TemporaryDirectory(prefix="cdrmix-doctor-") as name:
        folder = Path(name)
        prepare(configuration(folder, device), say=lambda text: None)
        status, message = launch(processes, ["doctor", "--worker", name, "--device", device])
        results = folder / "findings.json"
        findings = [Finding(*each) for each in parse_json(results.read_text())] if results.exists() else []
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
    for mode, divided in modes(world.size, config.cdrmix_model.feed_forward.experts).items():
        keys = [f"train.{key}={count}" for key, count in divided.items()]
        for stage in (0, 1) if "pipeline_parallel" in divided else (0, 1, 2, 3):
            layout = configuration(folder, device, f"train.zero_stage={stage}", "train.micro_batch_rows=1", *keys)
            findings.append(engine(f"ZeRO {stage}{mode}", layout, config, shards))
    if world.is_main_process:
        (folder / "findings.json").write_text(json.dumps(findings))


def modes(processes: int, experts: int) -> dict[str, dict[str, int]]:
    """The keys of `train` that divide the work, by what they divide: each alone, and with 4 or more processes those
    that work together, in pairs."""
    found: dict[str, dict[str, int]] = {"": {}}
    if processes == 1:
        return found
    over = {
        "experts": ("expert_parallel", min(processes, experts)),
        "tokens of a row": ("sequence_parallel", processes),
        "layers": ("tensor_parallel", 2),
        "blocks": ("pipeline_parallel", 2),
    }
    found |= {f", {what} over {count} processes": {key: count} for what, (key, count) in over.items()}
    if processes >= 4:
        # DeepSpeed refuses expert together with tensor parallelism.
        together = [pair for pair in itertools.combinations(over, 2) if pair != ("experts", "layers")]
        found |= {f", {one} and {other} over 2 each": {over[one][0]: 2, over[other][0]: 2} for one, other in together}
    return found


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
