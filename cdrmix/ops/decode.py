"""The compiled decoding step: which tensors it serves, and its two calls. It has no gradients and is no operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.decode.program import Program
from cdrmix.ops.backend import backend, compute_dtype, debugging, kernels_of


def is_served(x: Tensor) -> bool:
    """Whether `read` and `choose` serve tensors like x: float32 on a CPU with numba, without autocast and gradients.

    CDRMIX_DEBUG turns them off, because the ordinary operators check values.
    """
    return (
        x.dtype == torch.float32 == compute_dtype(x)
        and not torch.is_grad_enabled()
        and not debugging()
        and backend(x) == "cpu"
        and x.device.type == "cpu"
    )


def compiled(program: Program, width: int, hidden: int) -> Any:
    """The program for `read`. width: D of the model; hidden: the register of its last norm."""
    return kernels_of("decode", "cpu").compiled(program, width, hidden)


def read(
    compiled: Any,
    ids_BT: Tensor,
    weights: Sequence[int],
    states: Sequence[int],
    head_VD: Tensor | None,
    *,
    longest: int,
    wants_hidden: bool,
) -> tuple[int, Tensor | None, Tensor | None]:
    """Executes the program for int64 ids; see `kernels/decode/cpu.py`, `run`."""
    made: tuple[int, Tensor | None, Tensor | None] = kernels_of("decode", "cpu").run(
        compiled, ids_BT, weights, states, head_VD, longest=longest, wants_hidden=wants_hidden
    )
    return made


def choose(logits_BV: Tensor, temperature: float, points_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token of each row of float32 logits and its log probability; see `kernels/decode/cpu_sampling.py`."""
    made: tuple[Tensor, Tensor] = kernels_of("decode", "cpu").choose(logits_BV, temperature, points_B)
    return made
