"""The compiled decoding step: which tensors it serves, and its calls. It has no gradients and is no operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cdrmix.kernels.decode.program import Program
from cdrmix.ops.backend import backend, compute_dtype, debugging, kernels_of

if TYPE_CHECKING:
    from cdrmix.kernels.decode.cpu import Compiled, Run


def is_served(x: Tensor) -> bool:
    """Whether the step serves tensors like x: float32 on a CPU with numba, without autocast and gradients.

    CDRMIX_DEBUG turns it off, because the ordinary operators check values.
    """
    return (
        x.dtype == torch.float32 == compute_dtype(x)
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not debugging()
        and backend(x) == "cpu"
    )


def compiled(program: Program, width: int, hidden: int) -> Compiled:
    """The program for `run`. width: D of the model; hidden: the register of its last norm."""
    made: Compiled = kernels_of("decode", "cpu").compiled(program, width, hidden)
    return made


def run(*arguments: Any, longest: int, wants_hidden: bool = False) -> Run:
    """`kernels/decode/cpu.py`, `Run`, with its arguments."""
    made: Run = kernels_of("decode", "cpu").Run(*arguments, longest=longest, wants_hidden=wants_hidden)
    return made


def choose(logits_BV: Tensor, temperature: float, points_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token of each row of float32 logits and its log probability; see `kernels/decode/cpu_sampling.py`."""
    made: tuple[Tensor, Tensor] = kernels_of("decode", "cpu").choose(logits_BV, temperature, points_B)
    return made
