"""The machine that a benchmark runs on: its names, versions and load, and the rates that bound any kernel there."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cdrmix.gpus import gpu_by_name

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("torch", "triton", "numba", "numpy", "deepspeed", "tokenizers", "safetensors", "pydantic", "transformers"),
    *("fla-core", "tilelang", "rwkv", "rwkv-ops", "liger-kernel", "scattermoe", "axolotl", "sonic-moe"),
)


def facts() -> dict[str, Any]:
    """Commit, machine and versions, which every row has."""
    found = {}
    for name in ("cdrmix", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if found["cdrmix"] == "not installed":  # run from the checkout
        found["cdrmix"] = importlib.import_module("cdrmix").__version__
    return {
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "platform": platform.platform(),
        },
        "versions": {"python": sys.version.split()[0], **found},
    }


def commit() -> str:
    """The commit of this checkout, or CDRMIX_COMMIT where git does not know it, or 'unknown'."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return os.environ.get("CDRMIX_COMMIT") or "unknown"
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    """The processor's name, or its architecture where the system gives no name."""
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def datasheet(device: torch.device) -> dict[str, float] | None:
    """Rates that the vendor states; None where the table of GPUs does not have the device's name."""
    gpu = gpu_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else {"bytes_per_second": gpu.bytes_per_second, "flops_per_second": gpu.flops_per_second}


def measured_rates(device: torch.device) -> dict[str, float]:
    """The best of several large copies (bytes read and written) and of several large matrix products.

    On a GPU 2 GiB, and bfloat16 of 8192 x 8192; on a CPU 256 MiB, and float32 of 2048 x 2048, with PyTorch's threads.
    Random values: a GPU multiplies zeros faster than data.
    """
    on_gpu = device.type == "cuda"
    size, width = (1 << 31, 8192) if on_gpu else (1 << 28, 2048)
    copy = _copy_seconds(size, device)
    left, right = (
        torch.randn(width, width, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32) for _ in range(2)
    )
    product = min(_seconds(lambda: left @ right, device) for _ in range(6))
    return {"bytes_per_second": 2 * size / copy, "flops_per_second": 2 * width**3 / product}


def roofline(moved: int, computed: int, device: torch.device, milliseconds: float) -> dict[str, Any]:
    """The least time for so many bytes and operations, and the share reached: by stated and by measured rates."""
    measured, stated = measured_rates(device), datasheet(device)
    found: dict[str, Any] = {"least_bytes": moved, "flops": computed}
    for name, rates in {"datasheet": stated, "measured": measured}.items():
        if rates is None:
            continue
        by_bytes, by_flops = moved / rates["bytes_per_second"] * 1000, computed / rates["flops_per_second"] * 1000
        floor = max(by_bytes, by_flops)
        found[name] = {
            **rates,
            "floor_milliseconds": floor,
            "bound": "bytes" if by_bytes >= by_flops else "flops",
            "share": floor / milliseconds,
        }
    return found


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.ones_like(source)
    return min(_seconds(lambda: target.copy_(source), device) for _ in range(6))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
