"""The largest memory that this process has had: of a GPU, or of the process on a CPU.

Linux's VmHWM is read and not getrusage's ru_maxrss: a program that another one starts inherits the ru_maxrss of its
parent (fs/exec.c), so that a small run started by a large notebook would show the notebook's memory.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> bool:
    """Begins the count of the largest memory anew; whether this system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # man 5 proc: resets VmHWM
    except OSError:
        return False
    return True


def peak(device: torch.device) -> float:
    """Bytes: the largest memory since `reset_peak`, else since the process began its program."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device))
    return float(peak_resident())


def peak_resident() -> int:
    """Bytes: the largest resident memory of this process, whatever its device."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # no Linux, or a sandbox such as gVisor, which has no VmHWM
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
