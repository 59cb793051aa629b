"""A compiled decoding step on a CPU: a program of `program.py`, float32, in one call for all rows, tokens and blocks.

An ordinary pass of one token costs some 150 operations of PyTorch a block, of 5 to 10 us each. The loops compute the
same formulas. Their oracle is the ordinary pass of the model, `LanguageModel.forward`.

A lane is a token, and 8 lanes are a vector, so that no bit of a token depends on other rows. A sum over channels is
taken in their order. So the bits do not depend on how many tokens are read at once either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdrmix.kernels.common.cpu import address
from cdrmix.kernels.decode import cpu_program
from cdrmix.kernels.decode.cpu_sampling import choose as choose  # of the same step: a token of each row
from cdrmix.kernels.decode.program import OPERANDS, Program

# Tokens that are computed at once: their registers, 1,000 rows in a model of width 64, stay in a cache of 1 MB.
LANES = 128
LINE = 16  # floats of a cache line


@dataclass(frozen=True)
class Compiled:
    """A program in the form that `Run` reads, with the places of the last norm's register and of the head's scratch."""

    code: Tensor
    constants: Tensor
    rows: int
    width: int
    hidden: int
    by_row: int
    columns: int
    outputs: int


def compiled(program: Program, width: int, hidden: int) -> Compiled:
    """width: D of the model; hidden: the register of its last norm."""
    by_row, columns = program.register(width), program.register(width)
    outputs = program.register(2 * cpu_program.HEAD)
    code = torch.tensor(program.code, dtype=torch.int64)
    constants = torch.tensor(program.constants, dtype=torch.float32)
    return Compiled(code, constants, program.rows, width, hidden, by_row, columns, outputs)


class Run:
    """The memory of a program for int64 ids [B, T], which may be executed several times with other ids and states.

    weights: addresses. states [S, 2]: for each state its address and the bytes of a row; the memory at these addresses
    is changed, and the caller keeps it alive. head_VD: None for no logits. longest: most tokens of a row that attention
    reads. wants_hidden: whether `hidden_BTD` gets the hidden states.
    """

    def __init__(
        self,
        compiled: Compiled,
        ids_BT: Tensor,
        weights: Sequence[int],
        states: np.ndarray,
        head_VD: Tensor | None,
        *,
        longest: int,
        wants_hidden: bool = False,
    ) -> None:
        assert ids_BT.is_contiguous()
        assert ids_BT.dtype == torch.int64
        assert states.dtype == np.int64
        batch, length = ids_BT.shape
        piece = min(length, LANES)
        at_once = min(batch, max(1, LANES // piece))
        lines = -(-at_once * piece // LINE)
        stride = LINE * (lines + 1 - lines % 2)  # odd, so that the rows of a register do not share few sets of a cache
        memory = np.empty(compiled.rows * stride + longest + 4 * LINE, np.float32)
        scratch = memory.ctypes.data
        scratch += -scratch % 64
        self.hidden_BTD = torch.empty(batch, length, compiled.width) if wants_hidden else None
        self.logits_BV = None if head_VD is None else torch.empty(batch, len(head_VD))
        self.states, self._weights = states, np.array(weights, np.int64)
        self._alive = compiled, ids_BT, memory, head_VD
        self._program = (
            compiled.code.data_ptr(),
            len(compiled.code) // (OPERANDS + 1),
            self._weights.ctypes.data,
            states.ctypes.data,
            compiled.constants.data_ptr(),
            ids_BT.data_ptr(),
        )
        self._memory = (
            length,
            at_once,
            piece,
            scratch,
            stride,
            scratch + 4 * compiled.rows * stride,
            compiled.hidden,
            compiled.width,
            address(self.hidden_BTD),
            compiled.by_row,
            address(head_VD),
            0 if head_VD is None else len(head_VD),
            compiled.columns,
            compiled.outputs,
            address(self.logits_BV),
        )

    def execute(self, rows: int) -> int:
        """Reads the ids of the first `rows` rows. Returns 0; -1 for an id that is not in the vocabulary; or the number
        of the first router whose logits are not finite, from 1."""
        status: int = cpu_program.execute(*self._program, rows, *self._memory)
        return status
