"""Rows between ranks in slots, and as many as there are: the same bits, and with slots no count is read on the host.

The ranks are threads, each with its own share of the experts, that exchange through a list.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import ops
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.model.feed_forward import expert_parallel
from cdrmix.model.feed_forward.expert_parallel import (
    ExpertGroup,
    ExpertParallelFeedForward,
    Slots,
    arrived_order,
    arrived_slots,
)
from cdrmix.model.feed_forward.moe import MoeFeedForward


class Ranks:
    """all_to_all_single among threads; rows: how many each call sent, by rank."""

    def __init__(self, size: int) -> None:
        self.size, self.here = size, threading.local()
        self.barrier, self.board = threading.Barrier(size, timeout=60), [[]] * size
        self.rows: list[list[int]] = [[] for _ in range(size)]

    def exchange(self, result: Tensor, rows: Tensor, received: Any = None, sent: Any = None, **_: Any) -> Ranks:
        rank = self.here.rank
        self.rows[rank].append(len(rows))
        self.board[rank] = list(rows.detach().split(sent if sent is not None else len(rows) // self.size))
        if rows.is_cuda:
            torch.cuda.synchronize()  # streams of other threads do not wait for this one's
        self.barrier.wait()
        arrived = [self.board[other][rank] for other in range(self.size)]
        assert received is None or [len(piece) for piece in arrived] == received
        with torch.no_grad():
            result.copy_(torch.cat(arrived))
        if rows.is_cuda:
            torch.cuda.synchronize()
        self.barrier.wait()
        return self

    def wait(self) -> None:
        """Everything has arrived already."""

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self.here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [future.result() for future in futures]


class NoReads(TorchDispatchMode):
    """Refuses to hand a value to the host outside of an operator of ours, which sees counts of a CPU for nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.name() not in ("aten::_local_scalar_dense", "aten::nonzero"), function.name()
        return function(*args, **(kwargs or {}))


def model(experts: int) -> Model:
    feed_forward = FeedForward(kind="moe", experts=experts, top_k=2, hidden=6, capacity_factor=1.0, drop=True)
    rwkv = Rwkv(head_size=16, decay_rank=2, iclr_rank=2, value_rank=2, gate_rank=2)
    return Model(d_model=16, layers=1, attention=Attention(heads=1, kv_heads=1), rwkv=rwkv, feed_forward=feed_forward)


def layers(ranks: int, experts: int) -> tuple[MoeFeedForward, list[ExpertParallelFeedForward]]:
    torch.manual_seed(3)
    whole = MoeFeedForward(model(experts)).double()
    with torch.no_grad():
        whole.w_down.normal_()
    shared = []
    for rank in range(ranks):
        group = ExpertGroup(None, rank, ranks)  # type: ignore[arg-type]
        layer = ExpertParallelFeedForward(model(experts), group).double()
        with torch.no_grad():
            layer.w_up.copy_(group.share(whole.w_up))
            layer.w_down.copy_(group.share(whole.w_down))
        shared.append(layer)
    return whole, shared


def inputs(rank: int, experts: int, tokens: int, favour: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, logits, dy = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (16, experts, 16))
    logits[:, 0] += favour
    return [x.requires_grad_(), logits.requires_grad_(), dy]


def gradients(
    layer: MoeFeedForward, rank: int, experts: int, tokens: int, favour: float, skips: str = "nothing"
) -> list[Tensor]:
    """skips: "tokens", every third of the first rank and all of the others; or "filling", the last places of the first
    rank and all but two of the others, which have no share in the capacity."""
    x, logits, dy = (each.detach().to(layer.w_up.device) for each in inputs(rank, experts, tokens, favour))
    x, logits = x.requires_grad_(), logits.requires_grad_()
    places, keep, counted = torch.arange(tokens, device=x.device), None, tokens
    if skips == "tokens":
        keep = (places % 3 > 0) & (rank == 0)
    if skips == "filling":
        counted = tokens - 3 if rank == 0 else 2
        keep = places < counted
    routing = ops.route_topk(logits, 2, capacity=layer.router.capacity(counted), keep=keep)
    y = layer.mix(x, routing)
    with torch.autograd.set_multithreading_enabled(False):  # the thread of a GPU would have all ranks' backward passes
        return [y.detach(), *torch.autograd.grad(y, [x, logits, layer.w_up, layer.w_down], dy)]


@pytest.mark.gpu
def test_counts_that_travel_on_their_own_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, tokens, ranks = 6, 11, 2
    _, shared = layers(ranks, experts)
    group = Ranks(ranks)
    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
    expected = group.run(lambda rank: gradients(shared[rank], rank, experts, tokens, 0.0))
    monkeypatch.setattr(expert_parallel, "host_knows", lambda x: True)  # no slots
    group = Ranks(ranks)
    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
    found = group.run(lambda rank: gradients(shared[rank].cuda(), rank, experts, tokens, 0.0))
    for one, other in zip(found, expected, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-12, atol=1e-12)  # float64, sums of at most 22 rows


@pytest.mark.parametrize("skips", ["nothing", "tokens", "filling"])
@pytest.mark.parametrize("favour", [0.0, 50.0])
@pytest.mark.parametrize("ranks", [2, 3])
def test_slots_and_counts_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, ranks: int, favour: float, skips: str
) -> None:
    experts, tokens = 6, 11
    whole, shared = layers(ranks, experts)
    found = {}
    for padded in (False, True):
        group = Ranks(ranks)
        monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
        monkeypatch.setattr(expert_parallel, "host_knows", lambda x, padded=padded: not padded)
        found[padded] = group.run(lambda rank: gradients(shared[rank], rank, experts, tokens, favour, skips))
        sizes = {size for rank in group.rows for size in rank if size > experts}
        slots = experts * whole.router.capacity(tokens)
        assert (sizes == {slots}) == padded, "every message has the same length with slots, and only then"
    for one, other in zip(found[False], found[True], strict=True):
        assert all(map(torch.equal, one, other))
    expected = [gradients(whole, rank, experts, tokens, favour, skips) for rank in range(ranks)]
    assert skips != "tokens" or not expected[-1][0].any()
    assert skips != "filling" or not expected[-1][0][2:].any()
    for rank, one in enumerate(found[True]):
        for x, y in zip(one[:3], expected[rank][:3], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)  # float64, sums of at most 22 rows
        for i in (3, 4):
            total = shared[rank].experts.share(sum(each[i] for each in expected))
            torch.testing.assert_close(one[i], total, rtol=1e-12, atol=1e-12)


def test_with_slots_the_host_reads_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    group, (_, shared) = Ranks(2), layers(2, 4)
    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
    listed = Tensor.tolist

    def refuse(x: Tensor) -> Any:
        assert sys._getframe(1).f_globals["__name__"] != expert_parallel.__name__, "read by the host"
        return listed(x)

    monkeypatch.setattr(Tensor, "tolist", refuse)

    def work(rank: int) -> None:
        with NoReads():
            gradients(shared[rank], rank, 4, 9, 0.0)

    with pytest.raises(AssertionError, match="read by the host"):
        group.run(work)  # the check can fail: on a CPU the counts are read
    group = Ranks(2)
    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
    monkeypatch.setattr(expert_parallel, "host_knows", lambda x: False)
    group.run(work)


def test_a_wide_capacity_is_not_sent_as_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than twice as many slots as rows cost more than the wait; and outside training nothing is dropped."""
    monkeypatch.setattr(expert_parallel, "host_knows", lambda x: False)
    for change in (lambda layer: setattr(layer.router, "capacity_factor", 3.0), lambda layer: layer.eval()):
        group, (_, shared) = Ranks(2), layers(2, 6)
        monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", group.exchange)
        for layer in shared:
            change(layer)
            monkeypatch.setattr(layer, "_mix_padded", None)
        group.run(lambda rank, shared=shared: gradients(shared[rank], rank, 6, 9, 0.0))


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_arrived_slots_are_ordered_as_arrived_rows(counts: list[list[int]]) -> None:
    """Those with rows, taken out of their slots, have the order and the experts that rows without slots have."""
    received_SL, capacity = torch.tensor(counts), 4
    expert_N, order_N = arrived_slots(received_SL, capacity)
    rows = int(received_SL.sum())
    filled = (torch.arange(capacity) < received_SL.unsqueeze(-1)).flatten()
    row_of_slot = filled.cumsum(0) - 1
    wanted_order, wanted_expert = arrived_order(received_SL, rows)
    assert torch.equal(row_of_slot[order_N[:rows]], wanted_order)
    assert filled[order_N[:rows]].all()
    assert torch.equal(expert_N[filled], wanted_expert)
    assert sorted(order_N.tolist()) == list(range(len(filled)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_rows_come_back_from_their_slots(counts: list[int], dropped: int) -> None:
    rows = sum(counts) + dropped
    slots = Slots.of(torch.tensor(counts), 4, rows)
    wanted = [(expert * 4 + nth) for expert, count in enumerate(counts) for nth in range(count)]
    assert slots.slot_R[: len(wanted)].tolist() == wanted
    assert slots.kept_R.tolist() == [True] * len(wanted) + [False] * dropped
    assert slots.filled_N.nonzero().flatten().tolist() == wanted
    assert slots.row_N[slots.filled_N].tolist() == list(range(len(wanted)))
