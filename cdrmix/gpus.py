"""The table of GPUs that cdrmix knows: memory, rates and names, as the vendors and drivers state them.

It needs the standard library alone, so that benchmarks read it on a machine with nothing but PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    key: its name on the command line. names: as the driver reports them (`torch.cuda.get_device_name`), whole.
    memory_bytes: what PyTorch reports as the device's total (`torch.cuda.mem_get_info`), without ECC and the driver's
    own. bytes_per_second: of the device's memory. flops_per_second: dense bfloat16 products summed in float32.
    Both rates are the vendor's, from `source`.
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
    """The GPU whose driver reports this name; None where the table has none of exactly that name.

    Parts of names would mislead: "NVIDIA H200 NVL" and "NVIDIA GH200 480GB" are slower or smaller cards.
    """
    return next((gpu for gpu in GPUS if name in gpu.names), None)


def gpu_by_key(key: str) -> Gpu | None:
    """The GPU of that name on the command line; None where there is none."""
    return next((gpu for gpu in GPUS if gpu.key == key), None)
