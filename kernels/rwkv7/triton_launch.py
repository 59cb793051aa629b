"""The launches of RWKV-7's Triton kernels: chunk lengths, and warps and tiles by dtype, widths and architecture.

Each was chosen by its compiled code (benchmarks/aot.py); nothing is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cdrmix.kernels.common.triton_helpers import INTERPRETED

WIDTHS = (32, 64, 128)  # of keys and of values
SCANS = ("forward", "backward")  # one program a document or group, head and block of V
GROUPS = ("group_forward", "group_backward")  # one program a group, head and block of K + V
OVER_GROUPS = (*GROUPS, "group_scan")
ALL_CHUNKS = (*SCANS, *OVER_GROUPS, "token")  # the other kernels have one program a chunk and head


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: warps a program, stages of its loads, and columns of K and V that it holds at a time."""

    num_warps: int
    num_stages: int
    block_k: int
    block_v: int


def chunk_sizes(dtype: torch.dtype, K: int, V: int, arch: str = "sm_90") -> tuple[int, ...]:
    """The chunk lengths that ship for a dtype and widths, the default first.

    The default is 32: its products take less than half of the time, by the estimates of benchmarks/aot.py. 64 keeps
    fewer bytes for the backward pass; with float32 operands, and on architectures other than sm_90, it spills
    registers. Float32 keys of 128 have none: both scans and the map spill 16 to 400 bytes a thread in all tiles tried,
    so plain PyTorch is used. The interpreter has all of them, for tests.
    """
    if K == 128 and dtype == torch.float32 and not INTERPRETED:
        return ()
    longer = INTERPRETED or (dtype == torch.bfloat16 and arch == "sm_90")
    return (32, 64) if longer and max(K, V) <= 64 else (32,)


# By operand dtype and chunk: warps a program, and the most columns of K and of V at a time, by K, or by K and V, where
# one value does not fit all. They are the widest tiles tried that spill no register; BY_ARCHITECTURE has the exceptions
# of other architectures. On sm_90 a kernel may spill some bytes if it is estimated faster than in any launch without
# spills, and it has two warps where four would use wgmma with a first operand that is transposed in registers
# (benchmarks/aot.py checks both). On sm_100 some float16 and float32 kernels spill 4 to 56 bytes in every tile tried,
# and ship so; under Triton 3.6.0 two float16 kernels do so on sm_90 too, with 12 and 28 bytes.
Blocks = tuple[int, int, int]
Tiles = dict[str, Blocks | dict[int | tuple[int, int], Blocks]]
_BF16_32: Tiles = {
    "map": {32: (4, 32, 32), 64: (4, 64, 64), (64, 32): (4, 32, 32), 128: (4, 32, 64)},
    "map_keys": {32: (4, 32, 32), 64: (4, 64, 64), 128: (4, 32, 64)},
    "map_values": {32: (4, 32, 32), 64: (4, 64, 64), 128: (4, 32, 64)},
    "gradient_values": {
        32: (4, 32, 64),
        64: (4, 64, 64),
        128: (4, 32, 64),
        (128, 32): (4, 16, 32),
        (128, 64): (4, 16, 64),
    },
    "gradient_keys": {
        32: (2, 16, 64),
        64: (4, 64, 32),
        128: (4, 64, 64),
        (32, 128): (4, 16, 64),
        (128, 64): (4, 64, 32),
    },
}
_BF16_64: Tiles = {
    "map_keys": (4, 32, 64),
    "map_values": (4, 64, 64),
    "gradient_values": (4, 64, 32),
    "gradient_keys": {32: (4, 16, 64), (32, 64): (8, 16, 64), 64: (4, 16, 64)},
}
_FP16: Tiles = {
    "map_keys": (8, 16, 16),
    "map_values": {32: (4, 16, 32), 64: (4, 16, 32), 128: (4, 16, 32), (128, 32): (4, 16, 16)},
    "gradient_values": (4, 16, 32),
    "gradient_keys": dict.fromkeys(WIDTHS, (4, 32, 16)) | {(K, 32): (8, 16, 16) for K in WIDTHS},
}
_FP32: Tiles = {
    "map_keys": {32: (8, 32, 32), 64: (8, 32, 32), 128: (8, 16, 32)},
    "map_values": (8, 16, 32),
    "gradient_values": (8, 16, 32),
    "gradient_keys": {32: (8, 32, 32), (32, 32): (8, 32, 16), 64: (8, 32, 32), (64, 32): (8, 32, 16), 128: (8, 32, 32)},
}
BLOCKS = {
    (torch.bfloat16, 32): _BF16_32,
    (torch.bfloat16, 64): _BF16_64,
    (torch.float16, 32): _FP16,
    (torch.float16, 64): _FP16,
    (torch.float32, 32): _FP32,
    (torch.float32, 64): _FP32,
}
BY_ARCHITECTURE: dict[str, dict[tuple[torch.dtype, int], Tiles]] = {
    "sm_90": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (2, 64, 64), 128: (4, 32, 64)},
            "map_keys": {32: (4, 32, 32), 64: (2, 64, 64), 128: (4, 32, 64)},
            "gradient_keys": {32: (2, 32, 64), 64: (4, 64, 64), 128: (4, 64, 64)},
        },
        (torch.bfloat16, 64): {
            "map_values": (4, 32, 64),
            "gradient_keys": {32: (8, 32, 32), 64: (8, 32, 32), (64, 32): (4, 32, 32)},
        },
    },
    "sm_80": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (4, 32, 32), 128: (4, 32, 64)},
            "map_keys": {32: (4, 32, 32), 64: (4, 32, 64), 128: (4, 32, 64)},
            "gradient_values": (4, 32, 64),
            "gradient_keys": {
                32: (4, 16, 64),
                64: (4, 64, 32),
                128: (4, 64, 32),
                (64, 128): (4, 64, 64),
                (128, 128): (4, 64, 64),
            },
        },
        (torch.float16, 32): {"map_values": (4, 16, 16), "gradient_keys": (8, 16, 16)},
        (torch.float32, 32): {"map_values": {32: (8, 16, 16), 64: (8, 16, 32), 128: (8, 16, 32)}},
    },
    "sm_100": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (4, 32, 64), (64, 32): (4, 32, 32), 128: (4, 16, 64), (128, 128): (4, 32, 64)},
            "gradient_values": {32: (4, 32, 64), 64: (4, 64, 64), (64, 32): (4, 16, 32), 128: (4, 16, 64)},
            "gradient_keys": {
                32: (2, 16, 64),
                64: (4, 16, 32),
                128: (4, 16, 32),
                (32, 64): (4, 16, 64),
                (32, 128): (4, 16, 64),
                (128, 128): (4, 16, 64),
            },
        },
        (torch.float16, 32): {
            "map_values": {
                32: (4, 16, 32),
                64: (4, 16, 32),
                128: (4, 16, 32),
                (128, 32): (8, 16, 16),
                (128, 64): (8, 16, 16),
            },
            "gradient_keys": dict.fromkeys(WIDTHS, (4, 16, 16)) | {(K, 32): (8, 16, 16) for K in WIDTHS},
        },
        (torch.float32, 32): {
            "map_values": {32: (8, 16, 16), 64: (8, 32, 32), 128: (8, 16, 32)},
            "gradient_keys": {
                32: (8, 32, 32),
                (32, 32): (8, 16, 16),
                64: (8, 32, 32),
                (64, 32): (8, 32, 16),
                128: (8, 32, 32),
            },
        },
    },
    "gfx942": {
        (torch.bfloat16, 32): {"gradient_keys": {32: (2, 16, 64), 64: (4, 32, 32), 128: (4, 32, 32)}},
        (torch.float16, 32): {
            "gradient_keys": dict.fromkeys(WIDTHS, (4, 16, 32)) | {(K, 32): (4, 32, 32) for K in WIDTHS}
        },
        (torch.float32, 32): {"gradient_keys": (4, 32, 32)},
    },
}


def launch_of(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int) -> Launch:
    """The shipped launch."""
    if kernel == "token":
        return Launch(4, 1, K, 32)
    if kernel == "group_scan":
        return Launch(8, 1, K, 16) if K == 128 else Launch(4, 2 if arch == "gfx942" else 3, K, 16)
    if kernel in GROUPS and dtype == torch.bfloat16:
        return Launch(4, 2, K, min(K, V, 32 if arch == "sm_80" and K == 128 else 64))
    if kernel in (*SCANS, *GROUPS):
        if dtype == torch.float32:  # one stage, and from K = 128 on the state in two tiles
            return Launch(4, 1, min(K, 64), 16)
        if dtype == torch.float16 and (arch == "sm_80" or K == 128):
            return Launch(4, 1, min(K, 64), 16)
        # gfx942 has 64 KiB of shared memory for a program: R and P of one chunk at a time, in halves.
        return Launch(4, 1, min(K, 64), 32) if arch == "gfx942" else Launch(4, 2, K, 32)
    special = BY_ARCHITECTURE.get(arch, {}).get((dtype, C), {})
    blocks = special[kernel] if kernel in special else BLOCKS[dtype, C][kernel]
    if isinstance(blocks, dict):
        blocks = blocks[K, V] if (K, V) in blocks else blocks[K]
    warps, block_k, block_v = blocks
    return Launch(warps, 1, min(block_k, K), min(block_v, V))


def precision_of(kernel: str, arch: str, dtype: torch.dtype) -> str:
    """How float32 operands are multiplied.

    On gfx942 by float32 products. On NVIDIA GPUs by FMA within a chunk, where three TF32 products would spill
    registers, and by TF32 products in the scans, whose tiles are the widest and where FMA would spill.
    """
    if arch == "gfx942":
        return "ieee"
    if dtype == torch.float32:
        return "tf32x3" if kernel in ALL_CHUNKS else "ieee"
    if kernel == "group_scan":
        return "tf32x3"
    return "tf32"


def has_groups(arch: str, dtype: torch.dtype, K: int, V: int) -> bool:
    """Whether the kernels over groups of chunks ship: where a scan's program holds its state in one tile."""
    return launch_of("forward", arch, dtype, K, V, 32).block_k == K
