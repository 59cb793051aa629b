"""The kernels that fla-core launches for RWKV-7 on an H200, as Builds. Only benchmarks import fla-core.

The launches are recorded, not copied. fla's own chunk_rwkv7 runs forward and backward on tensors without data (B 8,
T 4096, H 32, K = V = 64, bfloat16), with Triton's launch replaced by a recorder. It is called as by its layer: with the
bound of the decay, which gives chunks of 64 and tensor-core gates, and with recomputation in the backward pass. Of the
configurations of fla's autotuner, builds() gives every number of warps with the middle number of stages and the largest
tiles; where a kernel loops over chunks, every number of stages too. The fastest by estimate that does not spill counts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.autotuner import Autotuner

from cdrmix.kernels.common.triton_helpers import Build

BATCH, LENGTH, HEADS, SIZE, CHUNK = 8, 4096, 32, 64, 64
DECAY_BOUND = -0.6065306597126334  # -exp(-1/2)

# Pointers of which a kernel reads only the last row of each chunk, or nothing; every other tensor moves once.
ONE_ROW = {
    ("chunk_dplr_fwd_kernel_h", "gk"),
    ("chunk_dplr_bwd_kernel_dhu", "gk"),
    ("chunk_dplr_bwd_o_kernel", "gk"),
}
UNREAD = {("chunk_dplr_bwd_o_kernel", "w")}
# Between its kernels: dv2 is filled with zeros (1 U), and the decay's gradient is cast from float32 (3 U).
ELEMENTWISE_BYTES = 4 * 2 * BATCH * LENGTH * HEADS * SIZE
SCANS = ("chunk_dplr_fwd_kernel_h", "chunk_dplr_bwd_kernel_dhu")  # loop over the chunks of a row


def absent() -> str:
    """Why fla-core cannot be compared; empty if it is installed."""
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed; pip install --no-deps fla-core==0.6.0 einops brings the peer"
    return ""


def version() -> str:
    """The version of the installed fla-core."""
    return importlib.metadata.version("fla-core")


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    configurations: list[triton.Config]
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    arguments: dict[str, Any]


def builds(architecture: str) -> list[Build]:
    """The kernels for sm_90, named `fla.forward.x`, `fla.backward.x`, or `fla.both.x` where both passes launch them."""
    if architecture != "sm_90":
        return []
    forward, backward = _record()
    names = [{one.kernel.fn.__name__ for one in launches} for launches in (forward, backward)]
    found = []
    for launch in {one.kernel.fn.__name__: one for one in (*forward, *backward)}.values():
        name = launch.kernel.fn.__name__
        when = "both" if name in names[0] & names[1] else "forward" if name in names[0] else "backward"
        found += [_build(f"fla.{when}.{name}", launch, one) for one in _tried(launch)]
    return found


def _tried(launch: _Launch) -> list[triton.Config]:
    """Which of a kernel's configurations are compiled; see the module's docstring."""
    every = launch.configurations
    stages = sorted({one.num_stages for one in every})
    if launch.kernel.fn.__name__ not in SCANS:
        stages = [stages[len(stages) // 2]]
    tiles = {name: max(value for one in every if (value := one.kwargs[name]) <= SIZE) for name in every[0].kwargs}
    return [one for one in every if one.kwargs == tiles and one.num_stages in stages]


def _build(name: str, launch: _Launch, chosen: triton.Config) -> Build:
    kernel = launch.kernel.fn.__name__
    arguments = launch.arguments | chosen.kwargs
    constant = {one.name for one in launch.kernel.params if one.is_constexpr}
    constants = {key: value for key, value in arguments.items() if key in constant or value is None}
    grid = launch.grid(arguments) if callable(launch.grid) else launch.grid
    return Build(
        name=name,
        kernel=launch.kernel,
        signature={key: _type(value) for key, value in arguments.items() if key not in constants},
        constants=constants,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        programs=math.prod(grid),
        flops=0,  # unknown
        bytes=sum(_bytes(kernel, key, value) for key, value in arguments.items() if isinstance(value, torch.Tensor)),
        trips=(LENGTH // CHUNK,) if kernel in SCANS else (),
    )


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _bytes(kernel: str, name: str, tensor: torch.Tensor) -> int:
    if (kernel, name) in UNREAD:
        return 0
    return tensor.numel() * tensor.element_size() // (CHUNK if (kernel, name) in ONE_ROW else 1)


def _record() -> tuple[list[_Launch], list[_Launch]]:
    """The launches of fla in a forward and in a backward pass."""
    launches: list[_Launch] = []

    def note(self: Autotuner, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip(self.arg_names, positional, strict=False)) | named
        launches.append(_Launch(self.fn, self.configs, grid, arguments))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no GPU
        import fla.utils
        import fla.utils.hardware

        # At import it asks for the device's shared memory; an H200 has enough for everything.
        fla.utils.check_shared_mem = fla.utils.hardware.check_shared_mem = lambda *_, **__: True
        from fla.ops.rwkv7.chunk import chunk_rwkv7

    shape = (BATCH, LENGTH, HEADS, SIZE)
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(6)]
    with mock.patch.object(Autotuner, "run", note):
        output, _ = chunk_rwkv7(*inputs, lower_bound=DECAY_BOUND)
        count = len(launches)
        output.backward(torch.empty_like(output))
    return launches[:count], launches[count:]
