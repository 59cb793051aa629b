"""RWKV-7 in Triton, run by its interpreter: against the definition in float64, and against itself bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from guarded import guarded
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import chunks, triton_helpers
from cdrmix.kernels.rwkv7 import reference
from cdrmix.kernels.rwkv7 import triton as wkv7

pytestmark = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")

NAMES = ("y", "last", "dr", "dlog_w", "dk", "dv", "da", "db", "dstate")
# RMS ratios to float64. Float32: sums of at most 64 rounded products through at most six products in a row come to
# 2e-6, the log decay's gradient included. Bfloat16, whose rounding is 1.7e-3 by itself: two to six rounded operands
# on the way to y and to the gradients.
FLOAT32, BFLOAT16_Y, BFLOAT16_GRADIENTS = 5e-6, 4e-3, 6e-3


@dataclasses.dataclass
class Case:
    """A call: inputs in the order of the kernels, the states, and the gradients that come in."""

    inputs: list[Tensor]
    state: Tensor
    dy: Tensor
    dlast: Tensor
    cu_seqlens: list[int]
    packed: bool

    def run(self, chunk: int, recompute: bool = False) -> list[Tensor]:
        """y, last, and the gradients dr, dlog_w, dk, dv, da, db, dstate."""
        cu_seqlens = torch.tensor(self.cu_seqlens, dtype=torch.int32) if self.packed else None
        y, last, saved = wkv7.wkv7_forward(
            *self.inputs, self.state, cu_seqlens, chunk=chunk, save=True, recompute=recompute, return_state=True
        )
        sizes = (*self.dy.shape[:3], self.inputs[0].shape[-1], self.dy.shape[-1], len(self.state))
        shapes = wkv7.wkv7_saved_shapes(*sizes, self.packed, self.dy.dtype, chunk=chunk, save=True, recompute=recompute)
        assert shapes == [(tuple(x.shape), x.dtype) for x in saved]
        gradients = wkv7.wkv7_backward(
            self.dy, self.dlast, *self.inputs, self.state, cu_seqlens, saved, chunk=chunk, recompute=recompute
        )
        return [y, last, *gradients]

    def exact(self) -> list[Tensor]:
        """The definition in float64 on each document apart."""
        doubles = [x.double().requires_grad_() for x in (*self.inputs, self.state)]
        flat = [x.reshape(1, -1, *x.shape[2:]) for x in doubles[:-1]]
        pieces, lasts = [], []
        for document, (start, end) in enumerate(itertools.pairwise(self.cu_seqlens)):
            last = doubles[-1][document : document + 1]
            if end > start:
                piece, last = reference.wkv7_recurrence(*[x[:, start:end] for x in flat], last)
                pieces.append(piece)
            lasts.append(last)
        y, last = torch.cat(pieces, 1).view(self.dy.shape), torch.cat(lasts)
        total = (y * self.dy.double()).sum() + (last * self.dlast.double()).sum()
        return [y.detach(), last.detach(), *torch.autograd.grad(total, doubles)]


def make(
    batch: int,
    length: int,
    heads: int,
    K: int,
    V: int,
    *,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    pinned: bool = False,
    seed: int = 0,
) -> Case:
    """r, log_w, k, v, a, b as RWKV-7 makes them: a unit removal key, decay above exp(-0.6065), or `pinned` there."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = (batch, length, heads)
    removal = torch.nn.functional.normalize(normal(*tokens, K), dim=-1)
    rate, decay = torch.sigmoid(normal(*tokens, K)), torch.sigmoid(normal(*tokens, K))
    log_w = torch.full_like(decay, -0.6065) if pinned else -0.6065 * decay
    inputs = [normal(*tokens, K), log_w, normal(*tokens, K), normal(*tokens, V), -removal, removal * rate]
    inputs = [x if x is log_w else x.to(dtype) for x in inputs]
    documents = cu_seqlens or list(range(0, batch * length + 1, length))
    state = (len(documents) - 1, heads, V, K)
    return Case(
        inputs, normal(*state) * 0.3, normal(*tokens, V).to(dtype), normal(*state), documents, cu_seqlens is not None
    )


def ratios(found: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    return {
        name: ((x.double() - y.double()).norm() / y.double().norm()).item()
        for name, x, y in zip(NAMES, found, wanted, strict=True)
    }


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    for name, x, y in zip(NAMES, left, right, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(
    ("chunk", "case"),
    [
        (32, make(1, 33, 2, 32, 64)),
        (32, make(1, 5, 1, 128, 32)),
        (64, make(1, 67, 1, 64, 64)),
        (64, make(1, 128, 1, 32, 64, pinned=True)),
        (32, make(1, 1, 1, 32, 32)),
        (32, make(1, 70, 1, 32, 32, cu_seqlens=[0, 0, 1, 33, 33, 66, 69, 70, 70])),
        (64, make(2, 70, 1, 32, 64, cu_seqlens=[0, 64, 70, 140])),
    ],
)
def test_float32_equals_the_definition(chunk: int, case: Case) -> None:
    found = case.run(chunk)
    assert all(x.isfinite().all() for x in found)
    assert {name: value for name, value in ratios(found, case.exact()).items() if not value < FLOAT32} == {}
    assert_same(case.run(chunk, recompute=True), found)


@pytest.mark.parametrize(
    ("chunk", "pinned"),
    [(32, False), (64, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((32, True), (64, False)))],
)
def test_bfloat16_is_near_the_definition(chunk: int, pinned: bool) -> None:
    """Operands and stored maps in bfloat16, sums in float32, as on a GPU; y and gradients rounded to bfloat16 too."""
    case = make(1, 130, 1, 64, 64, dtype=torch.bfloat16, pinned=pinned)
    found = ratios(case.run(chunk), case.exact())
    assert found["y"] < BFLOAT16_Y
    assert {name: value for name, value in found.items() if not value < BFLOAT16_GRADIENTS} == {}


def test_float16_is_near_the_definition() -> None:
    """The interpreter multiplies float32 as such, not TF32: the bar is the rounding of the results to float16."""
    case = make(1, 70, 1, 32, 32, dtype=torch.float16)
    found = ratios(case.run(32), case.exact())
    assert {name: value for name, value in found.items() if not value < 2**-11} == {}


def test_log_w_may_be_as_narrow_as_the_others() -> None:
    case = make(1, 40, 1, 32, 32, dtype=torch.bfloat16)
    case.inputs[1] = case.inputs[1].bfloat16()
    found = case.run(32)
    assert found[3].dtype == torch.bfloat16
    assert {name: value for name, value in ratios(found, case.exact()).items() if not value < 7e-3} == {}


def test_packed_documents_have_the_bits_of_documents_apart() -> None:
    cu_seqlens = [0, 1, 34, 34, 66]
    case = make(1, 66, 2, 32, 32, cu_seqlens=cu_seqlens)
    together = case.run(32)
    pieces = []
    for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        if end > start:
            one = slice(document, document + 1)
            parts = [x[:, start:end].contiguous() for x in (*case.inputs, case.dy)]
            alone = Case(parts[:-1], case.state[one], parts[-1], case.dlast[one], [0, end - start], packed=False)
            pieces.append((one, start, end, alone.run(32)))
    for one, start, end, apart in pieces:
        for name, x, y in zip(NAMES, together, apart, strict=True):
            assert torch.equal(x[one] if name in ("last", "dstate") else x[:, start:end], y), (name, start)
    empty = 2
    assert torch.equal(together[1][empty], case.state[empty])
    assert torch.equal(together[-1][empty], case.dlast[empty])


def test_rows_of_a_batch_have_their_bits_in_any_order() -> None:
    case = make(2, 40, 1, 32, 32)
    order = torch.tensor([1, 0])
    inputs = [x[order].contiguous() for x in case.inputs]
    other = Case(inputs, case.state[order], case.dy[order], case.dlast[order], case.cu_seqlens, packed=False)
    assert_same(other.run(32), [x[order] for x in case.run(32)])


def test_blocks_of_values_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of V do not depend on each other. Integers, so that BLAS, which the interpreter calls, sums exactly."""
    case = make(1, 40, 1, 32, 64)
    case.inputs = [x.mul(2).round() if i in (0, 2, 3) else torch.zeros_like(x) for i, x in enumerate(case.inputs)]
    case.state, case.dy, case.dlast = (x.mul(4).round() for x in (case.state, case.dy, case.dlast))
    wanted = case.run(32)
    launch_of = wkv7.launch_of
    for width in (16, 64):
        monkeypatch.setattr(wkv7, "launch_of", lambda *a, w=width: dataclasses.replace(launch_of(*a), block_v=w))
        assert_same(case.run(32), wanted)


def test_chunk_lengths_agree() -> None:
    case = make(1, 150, 1, 32, 32)
    found = ratios(case.run(64), case.run(32))
    assert {name: value for name, value in found.items() if not value < FLOAT32} == {}


def test_repeats_have_the_same_bits() -> None:
    """The interpreter is numpy in one thread, so two repeats; thirty on a GPU are in test_wkv7.py."""
    case = make(1, 8, 1, 32, 32)
    wanted = case.run(32)
    for _ in range(2):
        assert_same(case.run(32), wanted)


@pytest.mark.parametrize("longest", [1, 256])
def test_nothing_is_written_beside_the_results(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(wkv7, "GROUP", 1)
    monkeypatch.setattr(wkv7, "LONGEST", longest)  # chunks without groups
    case = make(1, 70, 1, 32, 64, cu_seqlens=[0, 1, 1, 40, 70])
    wanted = case.run(32, recompute=True)
    with guarded() as memory:
        assert_same(case.run(32, recompute=True), wanted)
    assert len(memory) > 15


def test_without_states_and_without_gradients() -> None:
    case = make(1, 40, 1, 32, 32)
    zeros = torch.zeros_like(case.state)
    y, last, saved = wkv7.wkv7_forward(
        *case.inputs, None, None, chunk=32, save=False, recompute=False, return_state=False
    )
    assert (tuple(last.shape), last.dtype, saved) == ((0,), torch.float32, [])
    other, _, saved = wkv7.wkv7_forward(
        *case.inputs, zeros, None, chunk=32, save=True, recompute=False, return_state=True
    )
    assert torch.equal(y, other)
    with_state = wkv7.wkv7_backward(
        case.dy, torch.zeros_like(zeros), *case.inputs, zeros, None, saved, chunk=32, recompute=False
    )
    without = wkv7.wkv7_backward(case.dy, None, *case.inputs, None, None, saved, chunk=32, recompute=False)
    assert tuple(without[-1].shape) == (0,)
    for x, z in zip(without[:-1], with_state[:-1], strict=True):
        assert torch.equal(x, z)


def test_one_token_is_the_recurrence() -> None:
    case = make(2, 1, 2, 64, 32)
    y, state = wkv7.wkv7_step(*(x[:, 0].contiguous() for x in case.inputs), case.state)
    wanted = case.exact()
    assert ((y.double() - wanted[0][:, 0]).norm() / wanted[0].norm()).item() < 1e-6
    assert ((state.double() - wanted[1]).norm() / wanted[1].norm()).item() < 1e-6


def test_what_is_saved_is_at_most_five_inputs() -> None:
    """At K = V = C = 64 in bfloat16; the docstring's figures."""
    B, T, H, K = 2, 256, 4, 64
    sizes, size = (B, T, H, K, K, B, False), B * T * H * K * 2
    for recompute, least, most in ((True, 1.0, 1.0), (False, 4.0, 5.0)):
        shapes = wkv7.wkv7_saved_shapes(*sizes, torch.bfloat16, chunk=64, save=True, recompute=recompute)
        saved = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)
        assert least <= saved / size <= most
    assert wkv7.wkv7_saved_shapes(*sizes, torch.bfloat16, chunk=64, save=False, recompute=False) == []


def test_a_chunk_that_does_not_ship_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        wkv7.pick_chunk(64, torch.bfloat16, 128, 128)


def test_the_chunk_table_against_a_loop() -> None:
    for cu_seqlens in ([0, 7], [0, 0, 32, 33, 33, 100, 164], [0, 1, 2, 3, 4], [0, 64, 64]):
        case = make(1, cu_seqlens[-1], 1, 32, 32, cu_seqlens=cu_seqlens)
        cu = torch.tensor(cu_seqlens)
        x = wkv7.Problem(case.inputs[0], case.inputs[3], cu, 32)
        table = x.table().tolist()
        assert len(table) == x.slots == cu_seqlens[-1] // 32 + len(cu_seqlens) - 1
        wanted = {}
        for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
            for i, first in enumerate(range(start, end, 32)):
                wanted[start // 32 + document + i] = [first, end]
        assert {slot: entry for slot, entry in enumerate(table) if entry[0] >= 0} == wanted


@pytest.mark.parametrize("arch", triton_helpers.ARCHITECTURES)
def test_every_kernel_is_built(arch: str) -> None:
    assert {build.name for build in wkv7.builds(arch)} == {f"wkv7_{kernel}" for kernel in wkv7.KERNELS}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups of two chunks in documents of four or more; the names of the kernels that are launched."""
    names: list[str] = []
    launch = wkv7.Problem.launch

    def note(self: wkv7.Problem, kernel: str, tensors: tuple[Tensor, ...], *numbers: int) -> None:
        names.append(kernel)
        launch(self, kernel, tensors, *numbers)

    monkeypatch.setattr(wkv7.Problem, "launch", note)
    monkeypatch.setattr(wkv7, "GROUP", 2)
    monkeypatch.setattr(wkv7, "LONGEST", 3)
    return names


GROUPED = ["group_forward", "group_scan", "group_backward", "group_scan"]


@pytest.mark.parametrize(
    ("chunk", "case"),
    [
        pytest.param(32, make(1, 193, 1, 32, 64), marks=pytest.mark.slow),  # three groups of two chunks, one token
        (32, make(1, 128, 1, 64, 32)),  # four whole chunks
        pytest.param(64, make(1, 257, 1, 32, 32, pinned=True), marks=pytest.mark.slow),
        (32, make(1, 170, 1, 32, 32, cu_seqlens=[0, 0, 1, 130, 130, 163, 170, 170])),  # long, short and empty ones
        pytest.param(32, make(2, 120, 1, 32, 32, cu_seqlens=[0, 20, 120, 121, 240]), marks=pytest.mark.slow),
    ],
)
def test_groups_in_float32_equal_the_definition(launched: list[str], chunk: int, case: Case) -> None:
    found = case.run(chunk)
    assert [name for name in launched if name.startswith("group")] == GROUPED
    assert all(x.isfinite().all() for x in found)
    assert {name: value for name, value in ratios(found, case.exact()).items() if not value < FLOAT32} == {}
    assert_same(case.run(chunk, recompute=True), found)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
def test_groups_in_bfloat16_are_near_the_definition(launched: list[str], pinned: bool) -> None:
    """The bars of the scan over chunks: what groups add is float32."""
    case = make(1, 290, 1, 64, 64, dtype=torch.bfloat16, pinned=pinned)
    found = ratios(case.run(32), case.exact())
    assert "group_backward" in launched
    assert found["y"] < BFLOAT16_Y
    assert {name: value for name, value in found.items() if not value < BFLOAT16_GRADIENTS} == {}


@pytest.mark.long
def test_slow_decay_over_many_groups_is_as_near_in_bfloat16_as_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is kept over all groups: their maps, near 1, are not rounded to bfloat16."""
    case = make(1, 768, 1, 32, 32, dtype=torch.bfloat16)
    case.inputs[1] = (case.inputs[1] * 1e-3).to(torch.float32)
    exact = case.exact()
    without = ratios(case.run(32), exact)
    monkeypatch.setattr(wkv7, "GROUP", 2)
    monkeypatch.setattr(wkv7, "LONGEST", 3)
    grouped = ratios(case.run(32), exact)
    assert {name for name in NAMES if not grouped[name] < 1.1 * without[name]} == set()


@pytest.mark.slow
def test_packed_documents_in_groups_have_the_bits_of_documents_apart(launched: list[str]) -> None:
    """In one batch with long ones, short ones too; alone, a short one is not in groups and a long one is."""
    cu_seqlens = [0, 1, 130, 130, 163, 310]
    case = make(1, 310, 2, 32, 32, cu_seqlens=cu_seqlens)
    together = case.run(32)
    assert "group_scan" in launched
    for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        if end == start:
            assert torch.equal(together[1][document], case.state[document])
            assert torch.equal(together[-1][document], case.dlast[document])
            continue
        launched.clear()
        one = slice(document, document + 1)
        parts = [x[:, start:end].contiguous() for x in (*case.inputs, case.dy)]
        alone = Case(parts[:-1], case.state[one], parts[-1], case.dlast[one], [0, end - start], packed=False)
        apart = alone.run(32)
        assert ("group_scan" in launched) == (end - start > 96)
        for name, x, y in zip(NAMES, together, apart, strict=True):
            assert torch.equal(x[one] if name in ("last", "dstate") else x[:, start:end], y), (name, start)


def test_rows_in_groups_have_the_bits_of_rows_alone(launched: list[str]) -> None:
    case = make(2, 100, 1, 32, 32)
    together = case.run(32)
    for row in range(2):
        one = slice(row, row + 1)
        alone = Case([x[one] for x in case.inputs], case.state[one], case.dy[one], case.dlast[one], [0, 100], False)
        assert_same(alone.run(32), [x[one] for x in together])
    assert "group_scan" in launched


def test_a_group_of_all_chunks_is_the_scan_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(1, 100, 1, 32, 32)
    wanted = case.run(32)
    monkeypatch.setattr(wkv7, "GROUP", 8)
    monkeypatch.setattr(wkv7, "LONGEST", 3)
    assert_same(case.run(32), wanted)


def test_groups_are_reached_from_the_operator(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    case = make(1, 100, 1, 32, 32)
    inputs = [x.clone().requires_grad_() for x in case.inputs]
    state = case.state.clone().requires_grad_()
    y, last = ops.wkv7(*inputs, state=state, return_state=True, chunk=32)
    assert last is not None
    gradients = torch.autograd.grad([y, last], [*inputs, state], [case.dy, case.dlast])
    assert [name for name in launched if name.startswith("group")] == GROUPED
    assert_same([y.detach(), last.detach(), *gradients], case.run(32))


@pytest.mark.parametrize(
    ("B", "T", "H", "documents", "dtype", "group"),
    [
        (1, 65536, 32, None, torch.bfloat16, 32),
        (8, 65536, 32, None, torch.bfloat16, 32),  # whether a row is in groups does not depend on the other rows
        (1, 8193, 32, None, torch.bfloat16, 32),
        (1, 8192, 32, None, torch.bfloat16, 0),  # 256 chunks
        (8, 4096, 32, None, torch.bfloat16, 0),
        (4, 4096, 32, 5, torch.bfloat16, 32),  # one of five documents may have more than 8,192 tokens
        (4, 2048, 32, 5, torch.bfloat16, 0),
        (1, 65536, 66, None, torch.bfloat16, 32),
        (1, 65536, 67, None, torch.bfloat16, 0),  # two programs a head: more than an H200 has multiprocessors
        (1, 65536, 32, None, torch.float32, 32),
        (1, 65536, 34, None, torch.float32, 0),  # four programs a head
    ],
)
def test_groups_are_chosen_by_shapes(
    B: int, T: int, H: int, documents: int | None, dtype: torch.dtype, group: int
) -> None:
    r = torch.empty(1, dtype=dtype).expand(B, T, H, 64)
    cu_seqlens = None if documents is None else torch.linspace(0, B * T, documents + 1, dtype=torch.int64)
    assert wkv7.Problem(r, r, cu_seqlens, None).group == group


def test_keys_whose_scan_has_two_tiles_have_no_groups() -> None:
    r = torch.empty(1).expand(1, 65536, 1, 128)
    assert wkv7.Problem(r, r, None, None).group == 0


def test_every_slot_has_the_document_that_it_lies_in() -> None:
    for starts in ([0, 7], [0, 0, 32, 33, 33, 100, 164], [0, 64, 64]):
        cu_seqlens = torch.tensor(starts)
        slots = chunks.slot_count(1, starts[-1], len(starts) - 1, 32, packed=True)
        found = chunks.slot_documents(cu_seqlens, slots, 32).tolist()
        for document, (start, end) in enumerate(itertools.pairwise(starts)):
            first = start // 32 + document
            assert found[first : first + max(1, -(-(end - start) // 32))] == [document] * max(
                1, -(-(end - start) // 32)
            )
