"""Reads compiled kernels in Triton's GPU dialect and finds operands of Hopper's products that Triton compiled wrongly.

Triton 3.4 to 3.7.0 gave wrong numbers for a product (wgmma) of the transpose of another product's result, transposed in
registers (flash-linear-attention, issue 640). Element-wise results have a product's layout too if they are used by a
product, and are transposed the same way. Loaded tiles are transposed in shared memory, by the descriptor.
"""

from __future__ import annotations

import re

_VALUE = re.compile(r"%\w+")
_LINE = re.compile(r"\s*(%\w+)(?::\d+)? = ([\w.]+)(.*)$")
_ENDS = ("tt.load", "tt.dot", "ttng.warp_group_dot", "scf.")  # an operand is not followed beyond these


def transposed_operands(ttgir: str) -> list[str]:
    """The products by wgmma with an operand that is transposed in registers, by their names in the text."""
    made = {found[1]: (found[2], found[3]) for line in ttgir.splitlines() if (found := _LINE.match(line))}
    return [
        name
        for name, (operation, rest) in made.items()
        if operation == "ttng.warp_group_dot" and _comes_from_transpose(_VALUE.findall(rest)[:2], made)
    ]


def _comes_from_transpose(values: list[str], made: dict[str, tuple[str, str]]) -> bool:
    waiting, seen = list(values), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in made:
            continue
        seen.add(name)
        operation, rest = made[name]
        if operation == "tt.trans":
            return True
        if not operation.startswith(_ENDS):
            waiting += _VALUE.findall(rest.partition(" : ")[0])
    return False
