"""The SSD scan's implementations, Triton's by its interpreter, against the definition in float64 and each other."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import ModuleType

import pytest
import torch
from examples import examples
from guarded import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.ssd import cpu as ssd_scan_cpu
from cdrmix.kernels.ssd import reference as reference_scan
from cdrmix.kernels.ssd import triton as ssd_scan

NAMES = ("y", "last", "dq", "dk", "dv", "dlog_decay", "dstate")
# RMS ratio to float64 in float32: sums of up to 128 rounded products through at most three products in a row. Rounding
# the inputs alone costs 3e-8.
BAR = 1e-6
MODULES = ["reference", "cpu", "triton"]
EDGES = [0, 0, 1, 34, 34, 45, 60, 90, 90]  # empty documents, one token, longer than a chunk, a row's start


@pytest.fixture(params=MODULES)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton" and not triton_helpers.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=0: the kernels need a GPU")
    return importlib.import_module(f"cdrmix.kernels.ssd.{request.param}")


@dataclasses.dataclass
class Case:
    """A call: q, k, v, log_decay, the states, and the gradients that come in."""

    inputs: list[Tensor]
    state: Tensor
    dy: Tensor
    dlast: Tensor
    cu_seqlens: list[int]
    packed: bool
    exclusive: bool

    def run(self, kernels: ModuleType, chunk: int | None = None) -> list[Tensor]:
        """y, last, and the gradients dq, dk, dv, dlog_decay, dstate."""
        cu_seqlens = torch.tensor(self.cu_seqlens, dtype=torch.int32) if self.packed else None
        flags = {"chunk": chunk, "exclusive": self.exclusive}
        y, last, saved = kernels.ssd_scan_forward(
            *self.inputs, self.state, cu_seqlens, **flags, save=True, return_state=True
        )
        q, v = self.inputs[0], self.inputs[2]
        sizes = (q.shape, v.shape, len(self.state), self.packed, q.dtype)
        shapes = kernels.ssd_scan_saved_shapes(*sizes, chunk=chunk, save=True)
        assert shapes == [(tuple(x.shape), x.dtype) for x in saved]
        gradients = kernels.ssd_scan_backward(self.dy, self.dlast, *self.inputs, self.state, cu_seqlens, saved, **flags)
        return [y, last, *gradients]

    def exact(self) -> list[Tensor]:
        """The definition in float64 on each document apart."""
        doubles = [x.double().requires_grad_() for x in (*self.inputs, self.state)]
        flat = [x.reshape(1, -1, *x.shape[2:]) for x in doubles[:-1]]
        pieces, lasts = [], []
        for document, (start, end) in enumerate(itertools.pairwise(self.cu_seqlens)):
            last = doubles[-1][document : document + 1]
            if end > start:
                tokens = [x[:, start:end] for x in flat]
                piece, last = reference_scan.ssd_scan_recurrence(*tokens, last, self.exclusive)
                pieces.append(piece)
            lasts.append(last)
        y, last = torch.cat(pieces, 1).view(self.dy.shape), torch.cat(lasts)
        total = (y * self.dy.double()).sum() + (last * self.dlast.double()).sum()
        return [y.detach(), last.detach(), *torch.autograd.grad(total, doubles)]


def make(
    batch: int,
    length: int,
    groups: int,
    heads: int,
    K: int,
    V: int,
    *,
    cu_seqlens: list[int] | None = None,
    exclusive: bool = False,
    seed: int = 0,
) -> Case:
    """Everything normal, and decays e^-u with u uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    starts = cu_seqlens or list(range(0, (batch + 1) * length, length))
    inputs = [normal(batch, length, groups, K), normal(batch, length, groups, K), normal(batch, length, heads, V)]
    inputs.append(-torch.rand(batch, length, heads, generator=generator))
    states = [normal(len(starts) - 1, heads, V, K) for _ in range(2)]
    return Case(inputs, states[0], normal(batch, length, heads, V), states[1], starts, bool(cu_seqlens), exclusive)


def ratios(found: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """Differences, relative to the size of what is wanted, or to 1e-3 of a token where nothing is."""
    return {
        name: ((x.double() - y).norm() / max(y.norm().item(), 1e-3)).item()
        for name, x, y in zip(NAMES, found, wanted, strict=True)
    }


def assert_near(found: list[Tensor], wanted: list[Tensor], bar: float = BAR) -> None:
    assert {name: ratio for name, ratio in ratios(found, wanted).items() if not ratio <= bar} == {}


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("widths", [(8, 6), (24, 40), (72, 64)])
def test_every_width_equals_the_definition(kernels: ModuleType, widths: tuple[int, int], exclusive: bool) -> None:
    case = make(1, 37, 1, 1 if kernels is ssd_scan else 3, *widths, exclusive=exclusive)
    assert_near(case.run(kernels), case.exact())


@settings(max_examples=examples(12))
@given(
    length=st.integers(1, 70),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cuts=st.lists(st.integers(0, 70), max_size=3),
    exclusive=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("module", MODULES[:2])
def test_any_shape_equals_the_definition(
    module: str,
    length: int,
    groups: int,
    per_group: int,
    widths: tuple[int, int],
    cuts: list[int],
    exclusive: bool,
    seed: int,
) -> None:
    cu_seqlens = [0, *sorted(min(cut, length) for cut in cuts), length]
    case = make(1, length, groups, groups * per_group, *widths, cu_seqlens=cu_seqlens, exclusive=exclusive, seed=seed)
    assert_near(case.run(importlib.import_module(f"cdrmix.kernels.ssd.{module}")), case.exact(), 4 * BAR)  # few terms


@pytest.mark.parametrize("log_decay", [0.0, -1.6, -20.0, -1e4, -torch.inf])
@pytest.mark.parametrize("exclusive", [False, True])
def test_every_decay_equals_the_definition(kernels: ModuleType, log_decay: float, exclusive: bool) -> None:
    case = make(1, 70, 1, 1, 16, 16, exclusive=exclusive)
    case.inputs[3].fill_(log_decay)
    found, wanted = case.run(kernels), case.exact()
    assert all(x.isfinite().all() for x in found)
    assert_near(found, wanted, 2e-6)  # undecayed sums have up to 70 terms


def test_weak_decays_between_strong_ones_are_as_exact_as_alone(kernels: ModuleType) -> None:
    """The difference of two float32 sums would lose 1e-4 here: 32 tokens with -100 each, then weak ones."""
    case = make(1, 64, 1, 1, 16, 16)
    case.inputs[3][:, :56:2] = -100.0
    assert_near(case.run(kernels, 64), case.exact())


@pytest.mark.parametrize("kernels", MODULES[1:], indirect=True)  # BLAS may round a batch as its size has it
@pytest.mark.parametrize("exclusive", [False, True])
def test_packed_documents_equal_the_definition_and_documents_apart_bitwise(
    kernels: ModuleType, exclusive: bool
) -> None:
    case = make(2, 45, 1, 1, 8, 24, cu_seqlens=EDGES, exclusive=exclusive)
    packed = case.run(kernels)
    assert_near(packed, case.exact())
    flat = [x.view(1, 90, *x.shape[2:]) for x in (*case.inputs, case.dy)]
    for document, (start, end) in enumerate(itertools.pairwise(EDGES)):
        here = slice(document, document + 1)
        of_document = [packed[1][here], packed[-1][here]]
        if end == start:
            assert_same(of_document, [case.state[here], case.dlast[here]])
            continue
        *inputs, dy = (x[:, start:end].contiguous() for x in flat)
        apart = Case(inputs, case.state[here], dy, case.dlast[here], [0, end - start], False, exclusive).run(kernels)
        assert_same([apart[1], apart[-1]], of_document)
        of_tokens = [x.flatten(0, 1)[None, start:end] for x in (packed[0], *packed[2:-1])]
        assert_same([apart[0], *apart[2:-1]], of_tokens)


def test_chunk_lengths_agree(kernels: ModuleType) -> None:
    case = make(1, 100, 1, 1, 16, 16)
    assert_near(case.run(kernels, 64), [x.double() for x in case.run(kernels, 32)])


@pytest.mark.parametrize("kernels", MODULES[1:], indirect=True)  # BLAS may round a batch as its size has it
def test_states_hand_over_from_one_call_to_the_next(kernels: ModuleType) -> None:
    """Cut at a chunk's border, the bits are the same; the state's gradient is handed back."""
    case = make(1, 96, 1, 1, 16, 16)
    whole = case.run(kernels, 32)
    *inputs, dy = ([x[:, :64].contiguous(), x[:, 64:].contiguous()] for x in (*case.inputs, case.dy))
    early = Case([x[0] for x in inputs], case.state, dy[0], case.dlast, [0, 64], False, False)
    late = Case([x[1] for x in inputs], early.run(kernels, 32)[1], dy[1], case.dlast, [0, 32], False, False)
    after = late.run(kernels, 32)
    early.dlast = after[-1]
    before = early.run(kernels, 32)
    assert_same([after[1], before[-1]], [whole[1], whole[-1]])
    both = [torch.cat([x, y], 1) for x, y in zip(before[:1] + before[2:-1], after[:1] + after[2:-1], strict=True)]
    assert_same(both, whole[:1] + whole[2:-1])


@pytest.mark.parametrize("exclusive", [False, True])
def test_no_token_reads_a_later_one(kernels: ModuleType, exclusive: bool) -> None:
    case = make(1, 70, 1, 1, 8, 8, exclusive=exclusive)
    y = case.run(kernels)[0]
    if exclusive:  # the first token reads what the document starts from and nothing else
        wanted = torch.einsum("hvk,hk->hv", case.state[0], case.inputs[0][0, 0])
        assert_near([y[0, 0]] * 7, [wanted.double()] * 7)
    at = 40
    for x in case.inputs[1:] if exclusive else case.inputs:
        x[:, at + (0 if exclusive else 1) :] *= 0.5
    changed = case.run(kernels)[0]
    seen = at + 1
    assert torch.equal(changed[:, :seen], y[:, :seen])
    assert not torch.equal(changed[:, seen:], y[:, seen:])


def test_grouped_heads_are_repeated_heads(kernels: ModuleType) -> None:
    """10 heads of a group: on a CPU two parts of 5."""
    heads = 3 if kernels is ssd_scan else 10
    case = make(1, 20, 1, heads, 8, 8)
    grouped = case.run(kernels)
    case.inputs[:2] = [x.repeat_interleave(heads, 2) for x in case.inputs[:2]]
    repeated = case.run(kernels)
    repeated[2:4] = [x.sum(2, keepdim=True) for x in repeated[2:4]]
    assert_near(grouped, [x.double() for x in repeated])
    assert_same([grouped[i] for i in (0, 1, 6)], [repeated[i] for i in (0, 1, 6)])


def test_absent_states_are_zeros_and_what_is_not_wanted_is_not_made(kernels: ModuleType) -> None:
    case = make(1, 40, 1, 2, 16, 16)
    case.state.zero_()
    case.dlast.zero_()
    wanted = case.run(kernels)
    flags = {"chunk": None, "exclusive": False}
    y, last, saved = kernels.ssd_scan_forward(*case.inputs, None, None, **flags, save=False, return_state=False)
    assert (tuple(last.shape), last.dtype, saved) == ((0,), torch.float32, [])
    assert torch.equal(y, wanted[0])
    saved = kernels.ssd_scan_forward(*case.inputs, None, None, **flags, save=True, return_state=False)[2]
    gradients = kernels.ssd_scan_backward(case.dy, None, *case.inputs, None, None, saved, **flags)
    assert tuple(gradients[-1].shape) == (0,)
    assert_same(list(gradients[:-1]), wanted[2:-1])


def test_repeats_and_neighbours_alter_no_bit(kernels: ModuleType) -> None:
    case = make(3, 33, 1, 1, 16, 16)
    wanted = case.run(kernels)
    for _ in range(1 if kernels is ssd_scan else 30):
        assert_same(case.run(kernels), wanted)
    order = torch.tensor([2, 0, 1])
    case.inputs = [x[order] for x in case.inputs]
    case.state, case.dy, case.dlast = case.state[order], case.dy[order], case.dlast[order]
    assert_same(case.run(kernels), [x[order] for x in wanted])


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_step_is_the_scan_of_one_token(kernels: ModuleType, exclusive: bool) -> None:
    case = make(2, 1, 2, 4, 24, 40, exclusive=exclusive)
    y, state = kernels.ssd_scan_step(*(x[:, 0].contiguous() for x in case.inputs), case.state, exclusive)
    wanted = case.exact()
    assert_near([y] * 7, [wanted[0][:, 0]] * 7)
    assert_near([state] * 7, [wanted[1]] * 7)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_scan_cpu, "SERIAL_WORK", 0)
    case = make(2, 50, 1, 12, 16, 16, cu_seqlens=[0, 30, 50, 51, 100])
    wanted, threads = case.run(ssd_scan_cpu), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert_same(case.run(ssd_scan_cpu), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernels", MODULES[1:], indirect=True)
def test_nothing_is_written_beside_the_results(kernels: ModuleType) -> None:
    case = make(1, 70, 1, 2, 12, 20, cu_seqlens=[0, 1, 1, 40, 70])
    wanted = case.run(kernels)
    with guarded() as memory:
        assert_same(case.run(kernels), wanted)
    assert len(memory) >= 6


@pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")
def test_bfloat16_is_as_exact_as_its_rounding() -> None:
    """Rounding y alone is 1.7e-3 by RMS: two to four rounded operands on the way to y and to the gradients."""
    case = make(1, 100, 1, 1, 32, 32)
    case.inputs, case.dy = [x.bfloat16() for x in case.inputs], case.dy.bfloat16()
    assert_near(case.run(ssd_scan), case.exact(), 6e-3)


@pytest.mark.parametrize("arch", triton_helpers.ARCHITECTURES)
def test_every_kernel_is_built(arch: str) -> None:
    assert {build.name for build in ssd_scan.builds(arch)} == {f"ssd_scan_{kernel}" for kernel in ssd_scan.KERNELS}


def test_a_chunk_that_does_not_ship_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        ssd_scan.pick_chunk(16, torch.bfloat16)
