"""The components of the memory of training, and what is assumed about the runtime of a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FP32 = 4
BYTES_16_BIT = 2  # of an element of an attached copy, bf16 or fp16
# Assumptions that must be measured on each card:
GPU_RUNTIME = int(0.9e9)  # context, loaded kernels, cuBLAS workspaces
NCCL_BUFFERS = int(0.6e9)  # of a process in a group of several
FRAGMENTATION_SHARE = 0.03  # of the memory that a micro-batch allocates and frees: gaps of the caching allocator
# Resident memory of Python, PyTorch, DeepSpeed and compiled kernels. Measured with the CPU build of PyTorch 2.13.
CPU_RUNTIME = int(0.8e9)


@dataclass(frozen=True)
class Component:
    """A part of the memory: bytes at the time of the highest use."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process.

    tensors: without the memory of the runtime. host_bytes: main memory that a process of a GPU run needs to build the
    model and for what train.offload moves, and the first process to gather a checkpoint; 0 on a CPU, where it is the
    memory of the device.
    """

    components: tuple[Component, ...]
    saved_by_operator: dict[str, int]
    tensors: int
    host_bytes: int

    @property
    def total(self) -> int:
        return sum(component.bytes for component in self.components)


def gradients(stage: int, here: int, shared: int, accumulation: int, processes: int) -> Iterator[Component]:
    """Gradients that last between micro-batches. here: parameters of a process; shared: its part of all of them."""
    if stage < 2:
        if accumulation > 1:
            yield Component("gradients", FP32 * here, "float32, accumulated over the micro-batches")
        # Otherwise they are allocated while activations are freed: the trace includes them.
    elif stage == 2:
        copies, why = (2, "accumulated, and of the micro-batch") if accumulation > 1 else (1, "of the micro-batch")
        yield Component("gradients", copies * FP32 * shared, f"float32, 1/{processes}, {why}")
    else:
        yield Component("gradients", FP32 * shared, f"float32, 1/{processes}")
