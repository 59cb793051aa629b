"""The settings of this process: device, CPU threads, determinism, memory allocator and seeds.

If a GPU cannot be used, the errors give the reason: the build of PyTorch, the driver, the kernels or the precision.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from cdrmix.code_caches import check_code_caches
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.kernels.common.products import (
    COLUMNS,
    is_wide,
    multiply_on_all_threads,
    multiply_on_one_thread,
    one_thread,
    restored_threads,
    set_num_threads,
)
from cdrmix.ops.backend import check_served
from cdrmix.ops.time_mix import HEAD_SIZES

BF16_CAPABILITY = (8, 0)  # lowest compute capability with bfloat16 products (Ampere)
DEVICES = ("auto", "cpu", "cuda")
# Determinism that libraries read when they start: cuBLAS's workspaces, and the order of NCCL's sums.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
DEVICE_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}  # exist if the driver is loaded


def device_type(wanted: str, source: str = "run.device") -> str:
    """The device type, cpu or cuda, that `wanted` (auto, cpu or cuda) selects on this machine.

    source: the key, option or argument that the user set, for the messages. Raises ConfigError for any other string,
    and for cuda if PyTorch cannot use a GPU. The message gives the reason.
    """
    if wanted not in DEVICES:
        raise ConfigError(f"{source} must be one of {', '.join(DEVICES)}; found {wanted!r}")
    if wanted == "cpu" or torch.cuda.is_available():
        return "cpu" if wanted == "cpu" else "cuda"
    if wanted == "cuda":
        or_option = " (or the option --device)" if source == "run.device" else ""
        raise ConfigError(
            f"{source} is cuda, but PyTorch finds no GPU on this machine{_reason()}; "
            f"or set {source}{or_option} to auto or cpu"
        )
    return "cpu"


def _reason() -> str:
    makers = [maker for maker, file in DEVICE_FILES.items() if file.exists()]
    build = torch.version.cuda or torch.version.hip
    if build is None:
        if not makers:
            return f": PyTorch {torch.__version__} is a CPU build; on a machine with a GPU, install the GPU build"
        kind = "CUDA" if makers[0] == "NVIDIA" else "ROCm"
        return (
            f": PyTorch {torch.__version__} is a CPU build, but an {makers[0]} driver is loaded; install the "
            f"{kind} build of PyTorch (make install TORCH_INDEX=...)"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
        return f": {reason} (PyTorch {torch.__version__} is built for {build}); install a driver and a build that match"
    return ": the driver is loaded, but this process has access to no GPU; check CUDA_VISIBLE_DEVICES"


def check_cpu(precision: str) -> None:
    """Raises ConfigError for a precision that CPUs do not support."""
    if precision == "fp16":
        raise ConfigError("train.precision is fp16, which needs a GPU, but this run uses the CPU; set bf16 or fp32")


def check_gpu(device: torch.device, config: Config) -> None:
    """Raises ConfigError for a GPU that the kernels do not support, or that has no bf16 products, and for a head size
    of RWKV-7 that the GPU's kernels do not have."""
    check_served(device)
    if config.model.kind == "cdrmix" and "rwkv7" in config.cdrmix_model.mixers:
        size = config.cdrmix_model.rwkv.head_size
        if size not in HEAD_SIZES and os.environ.get("CDRMIX_BACKEND", "") != "reference":
            raise ConfigError(
                f"model.rwkv.head_size is {size}; on a GPU it must be one of {', '.join(map(str, HEAD_SIZES))}. Set "
                "one of them, or run.device: cpu"
            )
    if config.train.precision == "bf16" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < BF16_CAPABILITY:
            raise ConfigError(
                f"train.precision is bf16, but {torch.cuda.get_device_name(device)} does not support bfloat16: it has "
                f"compute capability {found[0]}.{found[1]}, bfloat16 needs {BF16_CAPABILITY[0]}.{BF16_CAPABILITY[1]}; "
                "set fp16 or fp32"
            )


def only_device(config: Config, wanted: str | None = None) -> torch.device:
    """The device of a process that runs a trained model alone.

    wanted: auto, cpu or cuda; it replaces run.device of the configuration.
    Raises ConfigError if the device does not exist.
    """
    device = device_type(config.run.device) if wanted is None else device_type(wanted, "device")
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def work_alone(config: Config, wanted: str | None = None) -> torch.device:
    """Sets threads and determinism for a command that runs a trained model in one process; returns `only_device`."""
    device = only_device(config, wanted)
    check_code_caches()
    set_num_threads(threads(config, 1))
    be_deterministic(any_threads=config.model.kind == "cdrmix")
    return device


@contextmanager
def working_alone(config: Config) -> Iterator[None]:
    """Within it, the process has the threads and the determinism of `work_alone`; afterwards its own again."""
    with _restored_computing():
        work_alone(config, "cpu")  # the settings are the same for each device
        yield


@contextmanager
def _restored_computing() -> Iterator[None]:
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    new = [name for name in ENVIRONMENT if name not in os.environ]
    with restored_threads():
        try:
            yield
        finally:
            for name in new:
                os.environ.pop(name, None)
            torch.set_deterministic_debug_mode(mode)
            torch.backends.cudnn.benchmark = benchmark
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restores at its end what this package sets in a process that it shares with a user: a notebook, a test.

    These are the CPU threads, the flags of determinism, the states of the random number generators, the environment
    variables and the filters of warnings. The process group and the settings of glibc's allocator stay: they can be
    set only once.
    """
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    with warnings.catch_warnings(), _restored_computing():
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])
            if on_gpus is not None:
                torch.cuda.set_rng_state_all(on_gpus)


def threads(config: Config, processes: int) -> int:
    """The largest number of CPU threads of a process: `run.threads`, or the available cores / processes."""
    return config.run.threads or max(1, len(os.sched_getaffinity(0)) // processes)


def be_deterministic(*, any_threads: bool = True) -> None:
    """Makes PyTorch refuse operations whose result depends on timing.

    any_threads: on a CPU, run products on one MKL thread, so that no bit of a model of this package depends on the
    number of threads. False for models of transformers, which have other sums that depend on it: all threads.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Equals torch.use_deterministic_algorithms(True), which also imports torch.compile's compiler and takes 1 s longer;
    # see training/compiling.py.
    torch.set_deterministic_debug_mode("error")
    # That setting also fills each torch.empty, which costs a pass over memory. cdrmix never reads such values.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if any_threads:
        multiply_on_one_thread()
    else:
        multiply_on_all_threads()


def threads_for(rows: int) -> AbstractContextManager[None]:
    """Within it, one CPU thread where products of so many rows take no more (see `products.is_wide`).

    What is left to share is the norms and sums of few rows, some 10 us, less than waking a second thread costs: on two
    cores, while another process is busy, a token of core-tiny takes 15 ms with one thread and 51 ms with two. No bit
    depends on the number.
    """
    return nullcontext() if is_wide(rows, COLUMNS) else one_thread()


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that PyTorch frees. Otherwise each new tensor causes page faults.

    Measured on core-tiny with one CPU thread: 10,000 page faults a step become 0, which saves 5 % of the time.
    Environment variables such as MALLOC_ARENA_MAX take precedence. Other C libraries are not changed.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    arena_max, mmap_threshold, top_pad, trim_threshold = -8, -3, -2, -1  # malloc.h
    libc.mallopt(arena_max, 1)  # the backward pass runs in another thread; one heap serves both
    libc.mallopt(mmap_threshold, 32 * 2**20)  # the maximum of glibc
    libc.mallopt(top_pad, 256 * 2**20)
    libc.mallopt(trim_threshold, 2**31 - 1)


def free_memory() -> None:
    """Frees the memory of engines that nothing uses any more, before another model is built; begins a GPU's peak anew.

    An engine is part of reference cycles. Python looks for these after a number of new objects, whatever their size:
    weights, moments and gradients of a training would still be there when the next one begins.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  libraries use the global generator
    torch.manual_seed(seed)
