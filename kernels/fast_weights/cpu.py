"""One token of the plastic low-rank update on a CPU: float32, every row by one thread, all in one loop over the rows.

The formulas are in `reference.step`, which is some 20 operations of PyTorch. Each takes 5 to 10 us in a token of a
small model, and there are up to four adapters a block; here there is one call. The order of a row's sums depends on the
sizes of the adapter alone, so no bit depends on the other rows or on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from cdrmix.kernels.common.cpu import check
from cdrmix.kernels.common.elementwise import ONE, ZERO, run, sigmoid, with_sums
from cdrmix.kernels.fast_weights.reference import RULES

HEBB, DELTA, OJA = (RULES.index(rule) for rule in ("hebb", "delta", "oja"))


@intrinsic
def _pointer(_context: Any, at: Any) -> Any:
    """The floats at an address."""
    kind = types.CPointer(types.float32)
    return kind(types.int64), lambda context, builder, _, at: builder.inttoptr(at[0], context.get_value_type(kind))


@with_sums
def _step(  # type: ignore[no-untyped-def]
    first, stride, batch, outputs, columns, rank, width, gated, rule, alpha, floor,
    y_at, own_at, last_at, up_at, rate_at, a_at, pending_at, after_at, carried_at,
):  # fmt: skip
    gates = np.int64(gated)
    y, up = carray(_pointer(y_at), (batch, outputs)), carray(_pointer(up_at), (outputs, rank))
    own, rate = carray(_pointer(own_at), (batch, columns)), carray(_pointer(rate_at), (1,))
    last = carray(_pointer(last_at), (batch, width + gates))
    carried = carray(_pointer(carried_at), (batch, width + gates))
    a, pending = carray(_pointer(a_at), (batch, rank, width)), carray(_pointer(pending_at), (batch, rank, width))
    after = carray(_pointer(after_at), (batch, rank, width))
    q, k, read = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(rank, np.float32)
    strength = np.float32(2) * sigmoid(rate[0])[0]
    for b in range(first, batch, stride):
        for j in range(width + gates):  # no slice: numba compiles its error message for two seconds
            carried[b, j] = own[b, j]
        square_q, square_k = floor, floor
        for j in range(width):
            square_q += own[b, j] * own[b, j]
            square_k += last[b, j] * last[b, j]
        scale_q, scale_k = ONE / np.float32(math.sqrt(square_q)), ONE / np.float32(math.sqrt(square_k))
        for j in range(width):
            q[j] = own[b, j] * scale_q
            k[j] = last[b, j] * scale_k
        beta = strength
        if gated:
            beta *= sigmoid(last[b, width] + own[b, width + 1])[0]
        for i in range(rank):
            total = ZERO
            for j in range(width):
                total += a[b, i, j] * q[j]
            read[i] = alpha * total
        for o in range(outputs):
            total = ZERO
            for i in range(rank):
                total += up[o, i] * read[i]
            y[b, o] += total
        values = own[b, width + 2 * gates :]
        if rule == OJA:
            for i in range(rank):
                for j in range(width):
                    k[j] -= pending[b, i, j] * values[i]
        for i in range(rank):
            change = values[i]
            if rule == DELTA:
                for j in range(width):
                    change -= pending[b, i, j] * k[j]
            change *= beta
            for j in range(width):
                after[b, i, j] = pending[b, i, j] + change * k[j]


def step(
    y: Tensor,
    own: Tensor,
    last: Tensor,
    b_up: Tensor,
    rate: Tensor,
    a: Tensor,
    pending: Tensor,
    *,
    alpha: float,
    floor: float,
    gated: bool,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """As `reference.step`."""
    batch, rank, width = a.shape
    after, carried = torch.empty_like(pending), torch.empty_like(last)
    tensors = (y, own, last, b_up, rate, a, pending, after, carried)
    check(*tensors)
    sizes = batch, len(b_up), own.shape[1], rank, width
    work = batch * rank * (4 * width + len(b_up))
    # Addresses and no arrays: making nine arrays takes 20 us, the loop for one row 10.
    addresses = [tensor.data_ptr() for tensor in tensors]
    run(_step, work, *sizes, gated, RULES.index(rule), np.float32(alpha), np.float32(floor), *addresses)
    return after, carried
