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
    """A program in the form that `run` reads, with the places of the last norm's register and of the head's scratch."""

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


def run(
    compiled: Compiled,
    ids_BT: Tensor,
    weights: Sequence[int],
    states: Sequence[int],
    head_VD: Tensor | None,
    *,
    longest: int,
    wants_hidden: bool,
) -> tuple[int, Tensor | None, Tensor | None]:
    """Reads the ids; returns 0 or the number of a router, the hidden states if wanted, the logits if there is a head.

    ids: int64, contiguous. weights: addresses. states: addresses and bytes of a row in turns; their memory is changed.
    longest: most tokens that attention reads, past ones and these. The caller keeps all tensors alive.
    """
    batch, length = ids_BT.shape
    piece = min(length, LANES)
    at_once = min(batch, max(1, LANES // piece))
    lines = -(-at_once * piece // LINE)
    stride = LINE * (lines + 1 - lines % 2)  # odd, so that the rows of a register do not share few sets of a cache
    memory = np.empty(compiled.rows * stride + longest + 4 * LINE, np.float32)
    scratch = memory.ctypes.data
    scratch += -scratch % 64
    every = torch.empty(batch, length, compiled.width) if wants_hidden else None
    logits = None if head_VD is None else torch.empty(batch, len(head_VD))
    tables = np.array(weights, np.int64), np.array(states, np.int64)
    status = cpu_program.execute(
        compiled.code.data_ptr(),
        len(compiled.code) // (OPERANDS + 1),
        *(table.ctypes.data for table in tables),
        compiled.constants.data_ptr(),
        ids_BT.data_ptr(),
        batch,
        length,
        at_once,
        piece,
        scratch,
        stride,
        scratch + 4 * compiled.rows * stride,
        compiled.hidden,
        compiled.width,
        address(every),
        compiled.by_row,
        address(head_VD),
        0 if head_VD is None else len(head_VD),
        compiled.columns,
        compiled.outputs,
        address(logits),
    )
    return status, every, logits
