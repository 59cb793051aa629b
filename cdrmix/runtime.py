"""How this process computes: its device, CPU threads, determinism, allocator and seeds.

Also why a GPU cannot be used: its build of PyTorch, driver, kernels or precision.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.kernels.common.products import COLUMNS, is_wide, multiply_on_one_thread, set_num_threads
from cdrmix.ops.backend import check_served

BF16_CAPABILITY = (8, 0)  # compute capability of the first NVIDIA GPUs that multiply bfloat16, Ampere
DEVICES = ("auto", "cpu", "cuda")
DEVICE_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}  # where the driver of a maker is loaded


def device_type(wanted: str) -> str:
    """cpu or cuda: what auto, cpu or cuda (run.device) means on this machine.

    Raises ConfigError for another word, and where cuda is asked for and PyTorch cannot use a GPU: with the reason.
    """
    if wanted not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}; found {wanted!r}")
    if wanted == "cpu" or torch.cuda.is_available():
        return "cpu" if wanted == "cpu" else "cuda"
    if wanted == "cuda":
        raise ConfigError(
            f"run.device: cuda, but PyTorch sees no GPU on this machine{_reason()}; "
            "or set run.device (where there is one, --device) to auto or cpu"
        )
    return "cpu"


def _reason() -> str:
    makers = [maker for maker, file in DEVICE_FILES.items() if file.exists()]
    build = torch.version.cuda or torch.version.hip
    if build is None:
        if not makers:
            return f": PyTorch {torch.__version__} is a CPU build. On a machine with a GPU install its GPU build"
        kind = "CUDA" if makers[0] == "NVIDIA" else "ROCm"
        return (
            f": PyTorch {torch.__version__} is a CPU build, though an {makers[0]} driver is loaded; install PyTorch's "
            f"{kind} build (make install TORCH_INDEX=...)"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        told = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
        return f": {told} (PyTorch {torch.__version__} is built for {build}); install a driver and a build that agree"
    return ": a driver is there, and no GPU that this process may use (CUDA_VISIBLE_DEVICES)"


def check_cpu(precision: str) -> None:
    """Raises ConfigError for a precision that CPUs have no products in."""
    if precision == "fp16":
        raise ConfigError("train.precision: fp16 needs a GPU, and this run is on a CPU; set bf16 or fp32")


def check_gpu(device: torch.device, precision: str) -> None:
    """Raises ConfigError for a GPU without kernels, or on which bf16 would only be imitated."""
    check_served(device)
    if precision == "bf16" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < BF16_CAPABILITY:
            raise ConfigError(
                f"train.precision: bf16, but {torch.cuda.get_device_name(device)} has no bfloat16 (compute capability "
                f"{found[0]}.{found[1]}, from {BF16_CAPABILITY[0]}.{BF16_CAPABILITY[1]} on); set fp16 or fp32"
            )


def work_alone(config: Config, wanted: str | None = None) -> torch.device:
    """The device of a command that runs a trained model in this process alone; threads and determinism are settled.

    wanted: auto, cpu or cuda, in place of the configuration's run.device.
    Raises ConfigError when the device asked for is missing.
    """
    device = device_type(config.run.device if wanted is None else wanted)
    set_num_threads(threads(config, 1))
    be_deterministic()
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def threads(config: Config, processes: int) -> int:
    """CPU threads of one process at most: `run.threads`, or the cores it may use divided by the processes."""
    return config.run.threads or max(1, len(os.sched_getaffinity(0)) // processes)


def be_deterministic() -> None:
    """Makes PyTorch refuse operations whose result depends on timing, on every device, or on a CPU on its threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of summation
    # As torch.use_deterministic_algorithms(True), but that also imports torch.compile's compiler, for 1 s: see
    # training/compiling.py.
    torch.set_deterministic_debug_mode("error")
    # That also fills every torch.empty, which costs a pass over memory; our code never reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    multiply_on_one_thread()


@contextmanager
def threads_for(rows: int) -> Iterator[None]:
    """Within it, one CPU thread where products of so many rows take no more (see `products.is_wide`).

    What is left to share is the norms and sums of few rows, some 10 us, less than waking a second thread costs: on two
    cores beside another busy process a token of core-tiny takes 15 ms with one thread and 51 ms with two. No bit
    depends on the number.
    """
    threads = torch.get_num_threads()
    if threads == 1 or is_wide(rows, COLUMNS):
        yield
        return
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(threads)


def keep_freed_memory() -> None:
    """Lets glibc keep what PyTorch frees, instead of giving every tensor's pages back and faulting them in again.

    Measured on core-tiny, one CPU thread: 10,000 page faults a step become none, 5 % of its time. Settings that
    the environment makes (MALLOC_ARENA_MAX and its kin) win; another C library is left alone.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    arena_max, mmap_threshold, top_pad, trim_threshold = -8, -3, -2, -1  # malloc.h
    libc.mallopt(arena_max, 1)  # the backward pass runs in a thread of its own; one heap serves both
    libc.mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc allows
    libc.mallopt(top_pad, 256 * 2**20)
    libc.mallopt(trim_threshold, 2**31 - 1)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the global generator that libraries draw from
    torch.manual_seed(seed)
