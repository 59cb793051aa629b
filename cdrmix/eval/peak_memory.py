"""The largest memory of a part of a program: of a GPU, or of the process on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> bool:
    """Begins the count of the largest memory anew; whether this system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # man 5 proc: resets VmHWM
    except OSError:
        return False
    return True


def peak(device: torch.device) -> float:
    """Bytes: the largest memory since `reset_peak`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
