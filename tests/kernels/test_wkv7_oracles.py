"""The definition in `reference.py` against other people's: flash-linear-attention's and rwkv-ops' recurrences."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cdrmix.kernels.rwkv7 import reference


def inputs(seed: int) -> list[Tensor]:
    """r, log_w, k, v, a, b float32 [2, 21, 3, 32] as RWKV-7 makes them, and a state [2, 3, 32, 32]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (2, 21, 3, 32)
    removal = torch.nn.functional.normalize(normal(*shape), dim=-1)
    log_w = -0.6065 * normal(*shape).sigmoid()
    return [
        normal(*shape), log_w, normal(*shape), normal(*shape), -removal, removal * normal(*shape).sigmoid(),
        normal(2, 3, 32, 32),
    ]  # fmt: skip


@pytest.fixture
def quiet() -> Iterator[None]:
    """Importing these packages warns, of CPUs without Triton and the like, and sets variables: not our business."""
    with patch.dict(os.environ, KERAS_BACKEND="torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", range(3))
def test_flash_linear_attention_agrees(seed: int) -> None:
    """Its recurrence is head first, keeps the state transposed, and scales the query by 1 / sqrt(K)."""
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    r, log_w, k, v, a, b, state = inputs(seed)
    y, last = reference.wkv7_recurrence(r, log_w, k, v, a, b, state)
    query, key, value, alpha, beta, decay = (x.transpose(1, 2) for x in (r * 32**0.5, k, v, a, b, log_w))
    theirs, their_last = dplr_recurrence(query, key, value, alpha, beta, decay, state.mT)
    # Two float32 recurrences of 21 steps over sums of 32: 2e-5 of the largest value is 170 roundings.
    torch.testing.assert_close(theirs.transpose(1, 2), y, rtol=0, atol=2e-5 * y.abs().max().item())
    torch.testing.assert_close(their_last.mT, last, rtol=0, atol=2e-5 * last.abs().max().item())


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", range(3))
def test_rwkv_ops_agrees(seed: int) -> None:
    """It takes w with a decay of exp(-exp(w)), and the state as [B, H, V, K]."""
    from rwkv_ops.rwkv7_kernel.native_keras_op import generalized_delta_rule

    r, log_w, k, v, a, b, state = inputs(seed)
    y, last = reference.wkv7_recurrence(r, log_w, k, v, a, b, state)
    theirs, their_last = generalized_delta_rule(r, (-log_w).log(), k, v, a, b, state)
    torch.testing.assert_close(theirs, y, rtol=0, atol=2e-5 * y.abs().max().item())
    torch.testing.assert_close(their_last, last, rtol=0, atol=2e-5 * last.abs().max().item())
