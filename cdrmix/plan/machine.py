"""The machine of a plan: this machine, or a GPU of the table of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix.config.schema import Config
from cdrmix.gpus import GPUS, Gpu, gpu_by_key, gpu_by_name
from cdrmix.ops.backend import Platform
from cdrmix.runtime import device_type

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # in cgroup v1, "no limit" is a number near 2^63


@dataclass(frozen=True)
class Machine:
    """A device that each process of a run has for itself. On a CPU the processes share the memory of the host.

    memory_bytes, flops_per_second: None if unknown. at_hand: a device of this machine, not of the table.
    host_bytes: main memory of this machine; None for another machine.
    """

    name: str
    platform: Platform
    memory_bytes: int | None
    flops_per_second: float | None
    source: str
    at_hand: bool
    host_bytes: int | None


def machine_for(config: Config, key: str | None, processes: int) -> Machine:
    """The machine with this key of the command line. None: this machine, with the device of run.device."""
    if key not in (None, "cpu"):
        gpu = gpu_by_key(key)
        assert gpu is not None, f"{key} is none of {[gpu.key for gpu in GPUS]}"
        platform: Platform = "hip" if gpu.names[0].startswith("AMD") else "cuda"
        return Machine(gpu.names[0], platform, gpu.memory_bytes, gpu.flops_per_second, gpu.source, False, None)
    if key == "cpu" or device_type(config.run.device) == "cpu":
        memory = host_memory()
        each = None if memory is None else memory // processes
        return Machine("this machine's CPU", "cpu", each, None, "this machine", True, memory)
    name = torch.cuda.get_device_name(0)
    known: Gpu | None = gpu_by_name(name)
    return Machine(
        name,
        "hip" if torch.version.hip is not None else "cuda",
        torch.cuda.get_device_properties(0).total_memory,
        None if known is None else known.flops_per_second,
        "memory as this machine reports it; rates "
        + ("unknown: the table of GPUs has no card of that name" if known is None else f"of the {known.source}"),
        True,
        host_memory(),
    )


def host_memory(root: Path = CGROUPS, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of main memory that this process may use: the machine's, or less where its control groups limit it.

    None where the system does not say.
    """
    limits = [limit for limit in (_total(meminfo), *_limits(root)) if limit is not None]
    return min(limits, default=None)


def _total(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _limits(root: Path) -> list[int | None]:
    """The limits of the control group of this process and of its parents, versions 2 and 1."""
    of_process = Path("/proc/self/cgroup")
    lines = of_process.read_text().splitlines() if of_process.is_file() else []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = base / path.lstrip("/")
            limits += [_limit(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(base)]
    return limits


def _limit(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() and int(text) < UNLIMITED else None
