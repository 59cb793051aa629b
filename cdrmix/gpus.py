"""The table of known GPUs: memory, rates and names, as stated by vendors and drivers.

This module needs only the standard library, so that benchmarks can use it on a machine that has only PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    key: its name on the command line. names: the full names of the driver (`torch.cuda.get_device_name`). memory_bytes:
    the total of PyTorch (`torch.cuda.mem_get_info`), without the memory of ECC and of the driver. bytes_per_second:
    bandwidth of the memory. flops_per_second: dense bfloat16 products accumulated in float32. Both rates are from the
    vendor, see `source`.
    """

    key: str
    names: tuple[str, ...]
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    source: str


GPUS = (
    Gpu("h200", ("NVIDIA H200",), int(139.8 * GIB), 4.8e12, 989.4e12, "NVIDIA H200 datasheet, SXM"),
    Gpu("h100", ("NVIDIA H100 80GB HBM3",), int(79.1 * GIB), 3.35e12, 989.4e12, "NVIDIA H100 datasheet, SXM"),
    Gpu("a100", ("NVIDIA A100-SXM4-80GB",), int(79.1 * GIB), 2.039e12, 312e12, "NVIDIA A100 datasheet, SXM 80 GB"),
    Gpu(
        "mi300x",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        int(191.9 * GIB),
        5.3e12,
        1307.4e12,
        "AMD Instinct MI300X data sheet",
    ),
    Gpu("rtx4090", ("NVIDIA GeForce RTX 4090",), int(23.6 * GIB), 1.008e12, 165.2e12, "NVIDIA Ada architecture paper"),
)


def gpu_by_name(name: str) -> Gpu | None:
    """The GPU with exactly this driver name, or None.

    Parts of names do not match: "NVIDIA H200 NVL" and "NVIDIA GH200 480GB" are slower or smaller GPUs.
    """
    return next((gpu for gpu in GPUS if name in gpu.names), None)


def gpu_by_key(key: str) -> Gpu | None:
    """The GPU with this name on the command line, or None."""
    return next((gpu for gpu in GPUS if gpu.key == key), None)
