"""Parses the text of compiled kernels: the instructions of SASS and AMDGCN, their classes, and their loops.

A loop is a natural one: a jump back to a block that every path to the jump passes. An instruction's weight is the
product of the trips of the loops around it, so a count is what one warp executes if it takes every branch inside those
loops: rare paths count as if they were taken, and a loop without stated trips counts once. All code of a
warp-specialised kernel counts for every warp.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

CLASSES = ("tensor", "fp32", "mufu", "global_load", "global_store", "shared_load", "shared_store", "local", "barrier")


@dataclass(frozen=True)
class Instruction:
    """One instruction. target: index of a jump's destination. falls: whether the next instruction can follow it."""

    opcode: str
    operands: str = ""
    target: int | None = None
    falls: bool = True
    control: int = 0  # the scheduling bits of SASS, see aot_time


@dataclass(frozen=True)
class Loop:
    """A natural loop: the index of its first instruction, and those of all its instructions."""

    head: int
    body: frozenset[int]


# SASS: `/*0170*/  @!P0 BRA `(.L_x_0) ;  /* 0x... */` with the upper word on the next line.
_SASS = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);\s*\}?\s*/\* 0x[0-9a-f]{16} \*/"
)
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"(\.?[\w$.]+):")
_LEAVE = ("EXIT", "RET", "BRA", "BRX", "JMP", "JMX", "KILL", "s_endpgm", "s_branch", "s_setpc_b64")


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of `nvdisasm -c -hex`."""
    lines: list[tuple[str, str, bool, int]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := _SASS.search(line):
            lines.append((found[2], found[3].strip(), found[1] is not None, 0))
        elif lines and (found := _UPPER.match(line)):
            lines[-1] = (*lines[-1][:3], int(found[1], 16) >> 41)
        elif found := _LABEL.match(line):
            labels[found[1]] = len(lines)
    return [_resolve(*line, labels, r"`\(([^)]+)\)") for line in lines]


def parse_amdgcn(text: str) -> list[Instruction]:
    """The instructions of the first function of an AMDGCN assembly text, as LLVM prints it."""
    lines: list[tuple[str, str, bool, int]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        code = line.partition(";")[0]
        if found := _LABEL.match(code):
            if found[1].startswith(".Lfunc_end"):
                break
            labels[found[1]] = len(lines)
        elif found := re.match(r"\t([a-z]\w+)(?:\s+(.*))?$", code.rstrip()):
            lines.append((found[1], found[2] or "", False, 0))
    return [_resolve(*line, labels, r"(\.LBB\w+)") for line in lines]


def _resolve(opcode: str, operands: str, guarded: bool, control: int, labels: dict[str, int], jump: str) -> Instruction:
    target = None
    if opcode.startswith(("BRA", "JMP", "s_branch", "s_cbranch")):
        found = re.search(jump, operands)
        target = labels.get(found[1]) if found else None
    # `BRA P1, ...` and `BRA.U UP1, ...` are conditional without a guard in front.
    conditional = guarded or re.match(r"!?U?P[0-6]\b", operands) is not None
    falls = conditional or opcode.split(".")[0] not in _LEAVE
    return Instruction(opcode, operands, target, falls, control)


@functools.cache
def class_of(opcode: str) -> str | None:
    """One of CLASSES, or None for other instructions (integers, conversions, moves, shuffles)."""
    for kind, pattern in _CLASS_PATTERNS.items():
        if pattern.match(opcode):
            return kind
    return None


_CLASS_PATTERNS = {
    "tensor": re.compile(r"(H|HG|I|D|Q|QG|B|O)MMA\b|UTC\w*MMA|v_mfma_|v_smfmac_"),
    "fp32": re.compile(r"(FFMA|FADD|FMUL)2?\b|v_(pk_)?(fma|fmac|mul|add|sub|subrev)(mk|ak)?_(legacy_)?f32"),
    "mufu": re.compile(r"MUFU|v_(exp|log|rcp|rsq|sqrt|rcp_iflag)_f32"),
    "global_load": re.compile(r"LDG(STS)?\b|LD\b|UBLKCP|UTMALDG|(global|buffer|flat)_load"),
    "global_store": re.compile(r"STG|ST\b|UTMASTG|(global|buffer|flat)_store"),
    "shared_load": re.compile(r"LDS|ds_read|ds_load"),
    "shared_store": re.compile(r"STS|ds_write|ds_store"),
    "local": re.compile(r"LDL|STL|scratch_(load|store)"),
    "barrier": re.compile(r"BAR\b|SYNCS|UCGABAR|s_barrier"),
}


@functools.cache
def bits_of(opcode: str) -> int:
    """The number of bits that a thread moves with a load or a store."""
    if found := re.match(r"(?:LDSM|STSM)\S*?\.([124])$|(?:LDSM|STSM)", opcode):  # 8x8 matrices of 16 bits, a warp
        return 32 * int(found[1] or 1)
    if found := re.search(r"dwordx([234])|_b(64|96|128)\b", opcode):  # AMD
        return 32 * int(found[1]) if found[1] else int(found[2])
    if found := re.search(r"\.(64|128|256)\b", opcode):
        return int(found[1])
    if re.search(r"\.[US]8\b|_[us]?byte|_[ubi]8\b", opcode):
        return 8
    return 16 if re.search(r"\.[US]16\b|_[us]?short|_[ubi]16\b", opcode) else 32


@functools.cache
def tensor_flops(opcode: str) -> int:
    """Operations of one tensor-core instruction of one warp; 0 where the opcode does not give its shape."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", opcode):  # four warps share it
        return 2 * int(found[1]) * int(found[2]) * int(found[3]) // 4
    if found := re.match(r"[HQ]MMA\.(16)(8)(4|8|16|32)\b", opcode):
        return 2 * 16 * 8 * int(found[3])
    if found := re.match(r"v_s?mfma\w*?_(\d+)x(\d+)x(\d+)", opcode):
        return 2 * int(found[1]) * int(found[2]) * int(found[3])
    return 0


def find_loops(code: list[Instruction]) -> list[Loop]:
    """The natural loops, by their first instruction."""
    starts = sorted(
        {0}
        | {one.target for one in code if one.target is not None and one.target < len(code)}
        | {index + 1 for index, one in enumerate(code[:-1]) if one.target is not None or not one.falls}
    )
    ends = [*starts[1:], len(code)]
    block_at = {start: block for block, start in enumerate(starts)}
    successors: list[list[int]] = []
    for end in ends:
        last = code[end - 1]
        following = [block_at[last.target]] if last.target is not None and last.target < len(code) else []
        if last.falls and end < len(code):
            following.append(block_at[end])
        successors.append(following)
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, following in enumerate(successors):
        for other in following:
            predecessors[other].append(block)

    dominators = _dominators(successors, predecessors)
    members: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for head in following:
            # A block that only jumps to itself is the trap after the end of a kernel.
            if head in dominators[block] and not (head == block and ends[block] - starts[block] == 1):
                members.setdefault(head, {head}).update(_reaches(block, head, predecessors))
    loops = [
        Loop(starts[head], frozenset(index for block in blocks for index in range(starts[block], ends[block])))
        for head, blocks in sorted(members.items())
    ]
    return [loop for loop in loops if not _waits(code, loop)]


def _waits(code: list[Instruction], loop: Loop) -> bool:
    """Whether a loop only polls: a barrier in memory, or the allocator of tensor memory."""
    polled = ("SYNCS", "NANOSLEEP", "UTCATOMSWS", "s_sleep")
    return len(loop.body) <= 16 and any(code[index].opcode.startswith(polled) for index in loop.body)


def _dominators(successors: list[list[int]], predecessors: list[list[int]]) -> list[set[int]]:
    """By block, the blocks that every path from the first one to it passes; none for unreachable blocks."""
    reachable = _closure(0, successors)
    found: list[set[int]] = [set(reachable) if block in reachable else set() for block in range(len(successors))]
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(reachable - {0}):
            before = [found[other] for other in predecessors[block] if other in reachable]
            new = set.intersection(*before) | {block}
            changed |= new != found[block]
            found[block] = new
    return found


def _closure(start: int, edges: list[list[int]]) -> set[int]:
    seen, waiting = {start}, [start]
    while waiting:
        for other in edges[waiting.pop()]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def _reaches(block: int, head: int, predecessors: list[list[int]]) -> set[int]:
    """The blocks from which `block` is reached without passing `head`."""
    return _closure(block, [[] if index == head else before for index, before in enumerate(predecessors)])


def weights(code: list[Instruction], trips: Iterable[int]) -> list[int]:
    """How often each instruction is executed, with the loops' trips in the order in which the loops begin.

    If the compiler made more loops than there are stated trips (an unrolled loop and its remainder), the further ones
    count once.
    """
    found = [1] * len(code)
    for loop, count in zip(find_loops(code), trips, strict=False):
        for index in loop.body:
            found[index] *= count
    return found


def count_classes(code: list[Instruction], weight: list[int]) -> dict[str, int]:
    """Numbers of executed instructions by class."""
    counts = dict.fromkeys(CLASSES, 0)
    for one, times in zip(code, weight, strict=True):
        if kind := class_of(one.opcode):
            counts[kind] += times
    return counts


def count_widths(code: list[Instruction], weight: list[int], kind: str) -> dict[int, int]:
    """Loads or stores of a class, by the bits that a thread moves."""
    counts: dict[int, int] = {}
    for one, times in zip(code, weight, strict=True):
        if class_of(one.opcode) == kind:
            counts[bits_of(one.opcode)] = counts.get(bits_of(one.opcode), 0) + times
    return dict(sorted(counts.items()))


def spilled_bytes(code: list[Instruction]) -> tuple[int, int]:
    """Bytes a thread stores to and loads from local memory in the text of the kernel, without weights of loops."""
    stores = sum(bits_of(one.opcode) for one in code if one.opcode.startswith(("STL", "scratch_store")))
    loads = sum(bits_of(one.opcode) for one in code if one.opcode.startswith(("LDL", "scratch_load")))
    return stores // 8, loads // 8
