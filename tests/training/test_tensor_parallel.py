"""Processes that divide the layers train as one process with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix import ops
from cdrmix.errors import ConfigError
from cdrmix.model.tensor_parallel import IGNORED, TensorGroup, cross_entropy
from cdrmix.plan.memory import memory_of
from cdrmix.training.build import build_loss_model
from cdrmix.training.launch import check_processes

Told = Callable[..., dict[str, float]]
DEPTH = "model.depth={capacity: 0.5, part: both}"
HEADS = ("model.attention.heads=4", "model.attention.kv_heads=4", "model.bigrams={rows: 52}")
SIZES = (
    *("model.d_model=64", "model.attention.qk_norm=true", "model.mamba.groups=4"),
    *(
        "model.feed_forward.dense_layers=[1]",
        "model.feed_forward.dense_hidden=24",
        "model.feed_forward.shared_hidden=8",
    ),
)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shares_give_the_gradients_of_whole_layers(told: Told, hybrid: tuple[str, ...], processes: int) -> None:
    parallel = f"train.tensor_parallel={processes}"
    for case, error in told("tensor_worker.py", "shares", processes, *hybrid, *HEADS, *SIZES, DEPTH, parallel).items():
        if case.startswith("without"):
            assert error > 1e-6, case
        else:
            # Sums of at most 48 tokens and 64 channels in float64, through four layers and back.
            assert error < 1e-12, case


class Alone(TensorGroup):
    """A group of one process."""

    def reduce_(self, x: torch.Tensor, operation: Any = None) -> torch.Tensor:
        return x


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@given(
    rows=st.integers(1, 40),
    ids=st.sampled_from([1, 7, 300]),
    sets=st.integers(0, 3),
    scale=st.sampled_from([1e-6, 1.0, 1e5]),
    seed=st.integers(0, 99),
)
def test_the_divided_loss_is_that_of_the_operator(
    dtype: torch.dtype | None, rows: int, ids: int, sets: int, scale: float, seed: int
) -> None:
    """Also for weights that float16 cannot hold, and for targets that do not count."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (rows, ids))
    targets = torch.randint(0, ids, (sets or 1, rows), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    weights = scale * torch.rand(targets.shape, generator=generator)
    if not sets:
        targets, weights = targets[0], weights[0]
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        plain = ops.linear_cross_entropy(hidden, weight, targets, weights=weights)
        divided = cross_entropy(hidden, weight, targets, weights, Alone(None, 0, 1))  # type: ignore[arg-type]
        with torch.no_grad():
            judged = cross_entropy(hidden, weight, targets, weights, Alone(None, 0, 1))  # type: ignore[arg-type]
    assert torch.equal(judged, divided)
    # Both round the logits and then their gradients, which are at most `scale`, to `dtype`. Last bits of some of them
    # may differ, since float32 sums are in another order: of 300 at most a tenth.
    tolerance = 30 * torch.finfo(dtype or torch.float32).eps
    torch.testing.assert_close(divided, plain, rtol=tolerance, atol=tolerance * scale)
    found = torch.autograd.grad(divided.sum(), (hidden, weight))
    for mine, theirs in zip(found, torch.autograd.grad(plain.sum(), (hidden, weight)), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * scale


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    hidden, weight, weights = torch.zeros(2, 4), torch.zeros(8, 4), torch.ones(2)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 8\)"):
        cross_entropy(hidden, weight, torch.tensor([3, 8]), weights, Alone(None, 0, 1))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_engine_trains_shares_as_whole_layers(told: Told, hybrid: tuple[str, ...]) -> None:
    """Two groups of two processes with different rows."""
    sizes = (*hybrid, *HEADS, *SIZES, "train.tensor_parallel=2")
    for case, error in told("tensor_worker.py", "engines", 4, *sizes, steps="2", stages="0123").items():
        assert error < 1e-5, case


@pytest.mark.long
def test_the_engine_trains_slices_of_shares(told: Told, hybrid: tuple[str, ...]) -> None:
    """Four processes with the same rows."""
    sizes = (*hybrid, *HEADS, *SIZES, "train.tensor_parallel=2", "train.sequence_parallel=2")
    for case, error in told("tensor_worker.py", "engines", 4, *sizes, steps="2", stages="03").items():
        assert error < 1e-5, case


def test_what_is_not_divided_is_refused(refuses: Callable[..., None], make_config, hybrid: tuple[str, ...]) -> None:
    even = ("model.d_model=32", "model.attention.kv_heads=2", "model.rwkv.head_size=16")
    refuses(
        (r"must divide model\.attention\.heads=2", "train.tensor_parallel=4"),
        (r"must divide model\.attention\.kv_heads=1", "train.tensor_parallel=2"),
        (r"must divide the 1 heads of RWKV-7", "train.tensor_parallel=2", "model.attention.kv_heads=2"),
        (r"must divide model\.mamba\.groups=1", *hybrid, *even, "model.mamba.groups=1", "train.tensor_parallel=2"),
        (r"must divide model\.feed_forward\.hidden=15", "model.feed_forward.hidden=15", "train.tensor_parallel=2"),
        (r"must divide model\.bigrams\.rows=7", "model.bigrams={rows: 7}", "train.tensor_parallel=2"),
        (r"1 with train\.optimizer\.kind muon", "train.optimizer=muon", "train.tensor_parallel=2"),
        (r"1 with train\.expert_parallel", "train.expert_parallel=2", "train.tensor_parallel=2"),
        (
            r"must divide model\.attention\.heads=2 / train\.tensor_parallel=2",
            *(*even, "train.sequence_parallel=2", "train.tensor_parallel=2"),
        ),
        (r"1 with model\.prediction", "model.prediction={tokens: 2}", "train.tensor_parallel=2"),
        (r"1 with count of a plugin", "train.tensor_parallel=2", "model.feed_forward.kind=count"),
    )
    config = make_config(*even, "train.tensor_parallel=2")
    check_processes(config, 2)  # together they have the 8 rows of a micro-batch
    with pytest.raises(
        ConfigError, match=r"train\.tensor_parallel: must divide the number of processes \(--nproc\), 3"
    ):
        check_processes(config, 3)
    with pytest.raises(ConfigError, match=r"the 4 processes over train\.tensor_parallel=2, 16; found 8"):
        check_processes(config, 4)
    with pytest.raises(ConfigError, match=r"needs a multiple of as many processes"):
        build_loss_model(config)


def test_a_plan_has_a_share_of_the_state(make_config) -> None:
    """Of a model of which nearly everything is divided."""

    def planned(divided: int, processes: int) -> dict[str, int]:
        sizes = (
            "model.d_model=256",
            "model.attention.heads=4",
            "model.attention.kv_heads=4",
            "model.rwkv.head_size=32",
        )
        config = make_config(
            *sizes, "model.feed_forward.hidden=1024", "train.zero_stage=auto", f"train.tensor_parallel={divided}"
        )
        return {each.name: each.bytes for each in memory_of(config, "cuda", processes).components}

    one, two, four, copied = planned(1, 1), planned(2, 2), planned(4, 4), planned(2, 4)
    for name in ("weights", "optimizer"):
        assert 0.5 * one[name] < two[name] < 0.51 * one[name]
        assert 0.25 * one[name] < four[name] < 0.26 * one[name]
    assert copied["weights"] == two["weights"]
    assert copied["optimizer"] == pytest.approx(two["optimizer"] / 2, rel=1e-3)  # by ZeRO-1 over the two copies
    assert two["working"] < one["working"]
