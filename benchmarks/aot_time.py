"""Estimated time of a launch on an H200, from its machine code: the largest of six lower bounds.

    hbm      bytes that it has to move, and bytes that it spills, / 4.3 TB/s (of 4.8; what large copies reach)
    issue    instructions x warps / 4 schedulers, on the busiest of 132 multiprocessors
    tensor   its tensor-core operations, 4096 a cycle (bf16 wgmma; half for TF32; mma.sync at 0.62 of it)
    mufu     its exp2 and reciprocals: 16 a cycle
    shared   its bytes between registers and shared or local memory, 128 a cycle; without bank conflicts and wgmma's
             reads
    latency  waves of programs x the cycles of one warp that is alone on the multiprocessor

The clock is 1.83 GHz, at which 132 x 4096 a cycle is the 989 TFLOP/s that NVIDIA states. The busiest multiprocessor has
ceil(programs / 132) programs. A warp alone issues in order: each instruction delays the next one by the cycles in its
scheduling bits and waits for the scoreboards they name (fields: Jia et al., arXiv:1804.06826, section 2.1). Loads from
global memory take 600 cycles, from shared memory 30, MUFU 20, a barrier 20 (of the order of Luo et al.,
arXiv:2501.12084), wgmma its throughput and 30. Spilled registers count as traffic of the cache that local memory shares
with shared memory, and also as if all of it went to HBM and came back. Little of it does, so a spill costs less than
estimated. A loop is executed twice, and the rest of its trips is extrapolated. Poor overlap is not modelled, so true
times are longer: compare estimates with estimates.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

from aot_code import Instruction, Loop, bits_of, class_of, find_loops, tensor_flops

PROCESSORS = 132
CLOCK = 1.83e9
BANDWIDTH = 4.3e12
TENSOR_FLOPS = 4096  # a cycle and multiprocessor
MMA_SYNC = 0.62
GLOBAL, SHARED, MUFU, BARRIER, TENSOR, OTHER = 600, 30, 20, 20, 30, 30  # cycles


@dataclass
class _Warp:
    """The clock of one warp, and its operations in flight."""

    now: float = 0.0
    ready: list[float] = field(default_factory=lambda: [0.0] * 6)  # scoreboards
    copies: float = 0.0  # asynchronous copies that belong to no group yet
    groups: list[float] = field(default_factory=list)
    tensor: float = 0.0

    def issue(self, one: Instruction) -> None:
        """Waits for the instruction's operands, issues it, and records when its result is ready."""
        bits = one.control
        stall, write, read, mask = bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
        self.now = max([self.now, *(self.ready[board] for board in range(6) if mask >> board & 1)])
        opcode = one.opcode
        if opcode.startswith("HGMMA"):
            self.tensor = max(self.tensor, self.now) + 4 * _tensor_cycles(opcode)
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            self.now = max(self.now, self.tensor + TENSOR)
        elif opcode.startswith("LDGSTS"):
            self.copies = self.now + GLOBAL
        elif opcode.startswith("LDGDEPBAR"):
            self.groups.append(self.copies)
        elif opcode.startswith("DEPBAR"):
            left = int(found[1], 16) if (found := re.search(r"(0x[0-9a-f]+)\s*$", one.operands)) else 0
            self.now = max([self.now, *self.groups[: len(self.groups) - left]])
            del self.groups[: len(self.groups) - left]
        elif opcode.startswith("BAR"):
            self.now += BARRIER
        if write < 6:
            self.ready[write] = max(self.ready[write], self.now + _latency(opcode))
        if read < 6:
            self.ready[read] = max(self.ready[read], self.now + OTHER)
        self.now += max(stall, 1)

    def skip(self, cycles: float, ready: list[float]) -> None:
        """Skips iterations of a loop, all like the one that began with these scoreboards."""
        self.now += cycles
        self.tensor += cycles
        self.copies += cycles
        self.ready = [time + cycles * (time != old) for time, old in zip(self.ready, ready, strict=True)]
        self.groups = [time + cycles for time in self.groups]


def _latency(opcode: str) -> int:
    kind = class_of(opcode)
    return {"global_load": GLOBAL, "shared_load": SHARED, "local": SHARED, "mufu": MUFU}.get(kind or "", OTHER)


@functools.cache
def _tensor_cycles(opcode: str) -> float:
    """Cycles of a multiprocessor's four tensor cores for one warp's part of an instruction."""
    rate = TENSOR_FLOPS * (0.5 if "TF32" in opcode else 1.0) * (1.0 if opcode.startswith("HGMMA") else MMA_SYNC)
    return tensor_flops(opcode) / rate


def chain_cycles(code: list[Instruction], trips: tuple[int, ...]) -> float:
    """Cycles from the first to the last instruction of a warp that is alone on the multiprocessor."""
    loops = {loop.head: loop for loop in find_loops(code)}
    rounds = dict(zip(loops, trips, strict=False))
    warp = _Warp()

    def walk(places: list[int], around: frozenset[int]) -> None:
        done: frozenset[int] = frozenset()
        for index in places:
            if index in done:
                continue
            if index in loops and index not in around:
                done |= loops[index].body
                repeat(loops[index], around | {index})
            else:
                warp.issue(code[index])

    def repeat(loop: Loop, around: frozenset[int]) -> None:
        left = rounds.get(loop.head, 1)
        for _ in range(min(left, 2)):
            started, ready = warp.now, list(warp.ready)
            walk(sorted(loop.body), around)
        if left > 2:
            warp.skip((left - 2) * (warp.now - started), ready)

    walk(list(range(len(code))), frozenset())
    return warp.now


def estimate(
    code: list[Instruction],
    weight: list[int],
    trips: tuple[int, ...],
    *,
    programs: int,
    num_warps: int,
    moved: int,
    resident: int,
) -> dict[str, float]:
    """The bounds in microseconds.

    moved: bytes from and to HBM without spilled ones; resident: programs a multiprocessor holds at once.
    """
    warps = math.ceil(programs / PROCESSORS) * num_warps
    tensor = mufu = shared = 0.0
    spilled = 0  # bytes of one warp
    for one, times in zip(code, weight, strict=True):
        kind = class_of(one.opcode)
        if kind == "tensor":
            tensor += times * _tensor_cycles(one.opcode)
        elif kind == "mufu":
            mufu += times * 32 / 16
        elif kind in ("shared_load", "shared_store", "local") or one.opcode.startswith("LDGSTS"):
            shared += times * bits_of(one.opcode) * 32 / 8 / 128
        if kind == "local":
            spilled += times * bits_of(one.opcode) * 32 // 8
    waves = math.ceil(programs / (PROCESSORS * resident))
    cycles = {
        "issue": warps * sum(weight) / 4,
        "tensor": warps * tensor,
        "mufu": warps * mufu,
        "shared": warps * shared,
        "latency": waves * chain_cycles(code, trips),
    }
    moved += spilled * num_warps * programs
    return {"hbm": moved / BANDWIDTH * 1e6} | {name: count / CLOCK * 1e6 for name, count in cycles.items()}
