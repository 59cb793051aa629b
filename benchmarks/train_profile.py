"""The time of a training step by families of kernels, from a profile.

On a GPU these are the kernels, copies and fills that PyTorch's profiler traced, with their launches and the bytes of
copies; on a CPU the operators, by the time spent in themselves. It also counts the bytes that operators read and write.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Family -> parts of the names of its kernels on a GPU and of its operators on a CPU. The first family with a matching
# part takes a name: a product inside attention belongs to attention, one in the experts' kernels to the experts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "communication": ("nccl", "allreduce", "all_reduce", "reduce_scatter", "allgather", "c10d"),
    "compiled": ("triton_poi_", "triton_red_", "triton_per_", "compiledfxgraph"),
    "wkv7": ("wkv7",),
    "scan": ("ssd_scan",),
    "moe": ("moe_", "grouped_mm", "groupproblemshape"),
    "time_mix": ("time_mix", "token_shift"),
    "ce": ("cross_entropy",),
    "attention": ("flash", "fmha", "attention", "attn", "sdpa"),
    "optimizer": ("adam", "multi_tensor_apply", "foreach"),
    "norm": ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "gammabeta", "add_norm"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass", "cublas", "gemv", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "embedding": ("embedding", "index"),
    "reduce": ("reduce", "aten::sum", "aten::mean", "vector_norm"),
    "copy": ("copy", "memcpy", "memset", "cast", "fill", "zero_", "aten::cat", "catarray"),
    "elementwise": ("elementwise", "aten::add", "aten::mul", "aten::div", "aten::sub"),
}
# Operators that access no memory, besides views.
FREE = {"aten::detach", "aten::alias", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::_unsafe_view"}
KERNELS_TOLD = 25  # the longest are listed by name; the families contain all


@dataclass
class Kernel:
    """Launches of one name: their number, their seconds, and the bytes that copies and fills report."""

    launches: int = 0
    seconds: float = 0.0
    bytes: int = 0


def family_of(name: str) -> str:
    """The family of a kernel or operator; "other" if no part of FAMILIES is in its name."""
    lowered = name.lower()
    return next((family for family, parts in FAMILIES.items() if any(part in lowered for part in parts)), "other")


def traced(call: Callable[[], object], device: torch.device, keep: Path | None = None) -> dict[str, Kernel]:
    """The launches of `call` on the device, by name. keep: file for the trace of a GPU."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    if not on_gpu:
        found: dict[str, Kernel] = defaultdict(Kernel)
        for event in profiler.key_averages():
            found[event.key] = Kernel(event.count, event.self_cpu_time_total / 1e6)
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of_trace(json.loads(path.read_text())["traceEvents"])


class OperatorBytes(TorchDispatchMode):
    """Counts, while it is entered, the bytes of the tensors that operators take and return, by family: `found`.

    For our own operators that is the least that their kernels move. Operators go by their own names: the products in
    the linear cross-entropy belong to it here, and to "gemm" among kernels. Bytes that are read and written count
    twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if not func.is_view and name not in FREE:
            tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
            self.found[family_of(name)] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def kernels_of_trace(events: Iterable[dict[str, Any]]) -> dict[str, Kernel]:
    """A GPU's kernels, copies and fills among the events of a trace, by name; its durations are in microseconds."""
    found: dict[str, Kernel] = defaultdict(Kernel)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernel = found[event["name"]]
            kernel.launches += 1
            kernel.seconds += event["dur"] / 1e6
            kernel.bytes += event.get("args", {}).get("bytes", 0)
    return found


def by_family(kernels: dict[str, Kernel], moved: dict[str, int], micro_batches: int) -> dict[str, Any]:
    """Milliseconds, launches and bytes of copies a micro-batch, by family, the longest first; and the longest kernels.

    moved: bytes by family of operators, see OperatorBytes; empty where they were not counted.

    The profiled work is divided by the number of its micro-batches, with an update if there is one.
    """
    families: dict[str, Kernel] = defaultdict(Kernel)
    for name, kernel in kernels.items():
        family = families[family_of(name)]
        family.launches += kernel.launches
        family.seconds += kernel.seconds
        family.bytes += kernel.bytes

    def told(kernel: Kernel) -> dict[str, float]:
        figures = {"milliseconds": kernel.seconds * 1e3 / micro_batches, "launches": kernel.launches / micro_batches}
        return figures | ({"copied_bytes": kernel.bytes / micro_batches} if kernel.bytes else {})

    def longest(table: dict[str, Kernel]) -> list[tuple[str, Kernel]]:
        return sorted(table.items(), key=lambda item: (-item[1].seconds, item[0]))

    return {
        "micro_batches": micro_batches,
        "milliseconds": sum(kernel.seconds for kernel in kernels.values()) * 1e3 / micro_batches,
        "launches": sum(kernel.launches for kernel in kernels.values()) / micro_batches,
        "operator_bytes": sum(moved.values()) / micro_batches if moved else None,
        "families": {name: told(kernel) for name, kernel in longest(families)},
        "operator_bytes_by_family": {name: count / micro_batches for name, count in sorted(moved.items())},
        "kernels": {name[:160]: told(kernel) for name, kernel in longest(kernels)[:KERNELS_TOLD]},
    }
