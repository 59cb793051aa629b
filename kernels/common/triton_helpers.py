"""What the Triton kernels share: the interpreter flag, architectures, and the description of a shipped kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from cdrmix.errors import ConfigError

INTERPRETED = triton.knobs.runtime.interpret  # kernels run in numpy, on the CPU: TRITON_INTERPRET=1 before this import
EMULATED = tl.constexpr(INTERPRETED)  # the same flag, for use inside kernels
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@functools.cache
def architecture(device: torch.device) -> str:
    """The newest of ARCHITECTURES whose configurations run on this device; sm_90 under the interpreter.

    Raises ConfigError for an AMD GPU of another architecture, because AMD's code and tiles fit one architecture each.
    """
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]  # "gfx942:sramecc+:xnack-"
        if name not in ARCHITECTURES:
            served = ", ".join(known for known in ARCHITECTURES if known.startswith("gfx"))
            raise ConfigError(
                f"this GPU, {torch.cuda.get_device_name(device)}, has AMD's architecture {name}; the kernels support "
                f"only {served} (MI300 series). Set CDRMIX_BACKEND=reference to use plain PyTorch, or run on a CPU"
            )
        return name
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


@dataclass(frozen=True)
class Build:
    """One kernel in one shipped configuration: what ahead-of-time compilation needs, and the cost of a launch.

    signature: type of every argument that is not a constant, by name: "*bf16", "*fp32", "*i32", "i32", "i64", "fp32".
    constants: value of every constexpr argument by name.
    programs, flops, bytes: of one launch at the reference shape (B 8, T 4096, H K = 2048). flops counts what the kernel
        computes, bytes the least it has to move.
    trips: iterations of each loop at that shape, in the order in which the loops begin; for a nested loop, iterations
        in one iteration of the outer loop. Loops with one iteration, and loops that the compiler unrolls
        (tl.static_range), are left out.
    variant: distinguishes builds with the same constants in tables.
    """

    name: str
    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    programs: int
    flops: int
    bytes: int
    trips: tuple[int, ...] = ()
    variant: str = ""


@triton.jit
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float32 x rounded to nearest even in dtype; Triton's interpreter by itself truncates to bfloat16."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(x, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x @ y, summed in float32. The interpreter stores bfloat16 as integers, which it would multiply."""
    if EMULATED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def dot_add(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x @ y + z, summed in float32."""
    if EMULATED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, z, input_precision=PRECISION)
