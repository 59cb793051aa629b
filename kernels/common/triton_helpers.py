"""What the Triton kernels share: interpreter flag, architectures, and the description of a kernel as it ships."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from cdrmix.errors import ConfigError

INTERPRETED = triton.knobs.runtime.interpret  # on CPU tensors, as numpy: TRITON_INTERPRET=1 before this import
EMULATED = tl.constexpr(INTERPRETED)  # the same, as kernels see it
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@functools.cache
def architecture(device: torch.device) -> str:
    """The newest of ARCHITECTURES whose configurations serve this device; sm_90's under the interpreter.

    Raises ConfigError for an AMD GPU that none of them serves: their code and tiles are for one architecture each.
    """
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]  # "gfx942:sramecc+:xnack-"
        if name not in ARCHITECTURES:
            served = ", ".join(known for known in ARCHITECTURES if known.startswith("gfx"))
            raise ConfigError(
                f"this GPU, {torch.cuda.get_device_name(device)}, is of AMD's architecture {name}; the kernels serve "
                f"{served} (MI300 series) alone. Set CDRMIX_BACKEND=reference for plain PyTorch, or run on a CPU"
            )
        return name
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


@dataclass(frozen=True)
class Build:
    """One kernel in one shipped configuration: what ahead-of-time compilation needs, and what a launch of it costs.

    signature: every argument that is not a constant, by name: "*bf16", "*fp32", "*i32", "i32", "i64", "fp32".
    constants: every constexpr argument by name. programs, flops, bytes: of one launch at the reference shape
    (B 8, T 4096, H K = 2048), flops counting what the kernel does and bytes the least it has to move. trips: how often
    each of its loops goes round at that shape, in the order in which the loops begin (one inside another: per round of
    the outer one); loops with one round, and loops that the compiler unrolls (tl.static_range), are left out. variant:
    what tells it from a build with the same constants, for whoever reads a table.
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
    """Float32 x in a dtype that may be narrower, rounded to nearest even: the interpreter cuts bfloat16's bits off."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(x, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x @ y, summed in float32; the interpreter would multiply bfloat16 as the integers it stores them in."""
    if EMULATED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def dot_add(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x @ y + z, summed in float32."""
    if EMULATED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, z, input_precision=PRECISION)
