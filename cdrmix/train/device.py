"""Which kind of device a run has, and why a GPU cannot be used: its build of PyTorch, driver, kernels or precision."""

from __future__ import annotations

from pathlib import Path

import torch

from cdrmix.errors import ConfigError
from cdrmix.ops.backend import check_served

BF16_CAPABILITY = (8, 0)  # compute capability of the first NVIDIA GPUs that multiply bfloat16, Ampere
DEVICE_FILES = {"NVIDIA": Path("/dev/nvidiactl"), "AMD": Path("/dev/kfd")}  # where the driver of a maker is loaded


def device_type(wanted: str) -> str:
    """cpu or cuda: what auto, cpu or cuda (run.device) means on this machine.

    Raises ConfigError where cuda is asked for and PyTorch cannot use a GPU: with the reason.
    """
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
