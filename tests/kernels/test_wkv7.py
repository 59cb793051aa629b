"""The recurrence through cdrmix.ops, on every implementation: properties in float32 against float64, and to the bit."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.rwkv7 import reference
from cdrmix.kernels.rwkv7.triton_launch import chunk_sizes as shipped_chunk_sizes
from cdrmix.ops import rwkv7 as recurrence

# Root-mean-square error over the root-mean-square value, against float64. float32 carries 6e-8 an operation, sums of
# 128 products and states of 90 tokens gather some 10 to 20 of them; the GPU's kernels go through an inverse as well.
BARS = {"cpu": 2e-6, "reference": 5e-6, "triton": 5e-6}
NAMES = ("r", "log_w", "k", "v", "a", "b", "state")


GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def on(*devices: object) -> pytest.MarkDecorator:
    """The test runs on these values of the fixture `where` only."""
    return pytest.mark.parametrize("where", devices, indirect=True, scope="module")


# The interpreter takes a second for each chunk and head: where examples are searched or rows are long it takes minutes.
# test_wkv7_triton.py has the cases of the quick tests, chosen at the edges.
long_interpreter = on("cpu", "reference", pytest.param("triton", marks=pytest.mark.long), GPU)
compiled = on("cpu", "reference", GPU)  # the same of the interpreter is in test_wkv7_triton.py


def device_of(where: str) -> str:
    return "cuda" if where == "cuda" else "cpu"


def bar_of(where: str) -> float:
    return BARS["triton" if where == "cuda" else where]


class Case:
    """Inputs of one call as RWKV-7 makes them: unit removal keys, decay above exp(-0.6065); float64 on the CPU."""

    def __init__(
        self,
        seed: int,
        batch: int,
        length: int,
        heads: int,
        widths: tuple[int, int],
        documents: list[int] | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        self.name = f"Case({seed}, {batch}, {length}, {heads}, {widths}, {documents}, pinned={pinned})"
        generator = torch.Generator().manual_seed(seed)
        key_width, value_width = widths

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def token(width: int) -> Tensor:
            return normal(batch, length, heads, width)

        removal = torch.nn.functional.normalize(token(key_width), dim=-1)
        log_w = torch.full_like(removal, -0.6065) if pinned else -0.6065 * token(key_width).sigmoid()
        self.documents = documents
        count = batch if documents is None else len(documents) - 1
        values = [token(key_width), log_w, token(key_width), token(value_width), -removal]
        values += [removal * token(key_width).sigmoid(), normal(count, heads, value_width, key_width)]
        # Rounded to float32, so that every implementation is asked the same question.
        self.inputs = dict(zip(NAMES, (value.float().double() for value in values), strict=True))
        self.dy = token(value_width).float().double()
        self.dlast = normal(count, heads, value_width, key_width).float().double()

    def __repr__(self) -> str:
        return self.name

    def cu_seqlens(self, device: str = "cpu") -> Tensor | None:
        return None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32, device=device)

    def exact(self) -> dict[str, Tensor]:
        """Outputs and gradients of the definition, document by document, in float64."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.inputs.items()}
        batch, length = self.dy.shape[:2]
        starts = self.documents or list(range(0, (batch + 1) * length, length))
        flat = [leaves[name].reshape(1, batch * length, *leaves[name].shape[2:]) for name in NAMES[:6]]
        outputs, lasts = [], []
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            last = leaves["state"][n : n + 1]
            if start < end:
                r, log_w, k, v, a, b = (x[:, start:end] for x in flat)
                y, last = reference.wkv7_recurrence(r, log_w, k, v, a, b, last)
                outputs.append(y)
            lasts.append(last)
        y, last = torch.cat(outputs, 1).view_as(self.dy), torch.cat(lasts)
        gradients = torch.autograd.grad([y, last], list(leaves.values()), [self.dy, self.dlast])
        return {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}

    def found(self, where: str, **options: Any) -> dict[str, Tensor]:
        """The same of the implementation that the environment names, in float32."""
        device = device_of(where)
        leaves = {name: value.float().to(device).requires_grad_() for name, value in self.inputs.items()}
        y, last = ops.wkv7(**leaves, cu_seqlens=self.cu_seqlens(device), return_state=True, **options)
        weights = [self.dy.float().to(device), self.dlast.float().to(device)]
        gradients = torch.autograd.grad([y, last], list(leaves.values()), weights)
        named = {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}
        return {name: value.detach().cpu() for name, value in named.items()}


def chunk_sizes(where: str, case: Case) -> tuple[int, ...]:
    """What can be asked for in float32: in the interpreter chunks of 64 up to widths of 64, on GPUs what ships."""
    widths = case.inputs["r"].shape[-1], case.dy.shape[-1]
    if where == "cuda":
        return shipped_chunk_sizes(torch.float32, *widths) or (32,)  # the reference takes any
    return (32,) if where == "triton" and max(widths) > 64 else (32, 64)


def error(found: Tensor, exact: Tensor) -> float:
    """Root-mean-square error relative to the root-mean-square value; not a number is infinitely wrong."""
    ratio = (found.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    return float("inf") if ratio.isnan() else ratio.item()


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], bar: float) -> None:
    errors = {name: error(found[name], exact[name]) for name in exact}
    assert max(errors.values()) <= bar, " ".join(f"{name} {value:.1e}" for name, value in errors.items())


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


WIDTHS = [(32, 32), (32, 32), (64, 64), (32, 64), (64, 32), (128, 32), (32, 128)]


@st.composite
def cases(draw: st.DrawFn, widest: int = 128) -> Case:
    """Odd lengths, all widths, one document a row or many, empty ones and single tokens among them."""
    length = draw(st.one_of(st.integers(1, 5), st.sampled_from([31, 32, 33, 45, 63, 64, 65])))
    batch = draw(st.integers(1, 2)) if length <= 45 else 1
    widths = draw(st.sampled_from([each for each in WIDTHS if max(each) <= widest]))
    documents = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, batch * length), max_size=5))
        documents = sorted([0, batch * length, *range(0, batch * length, length), *inner])
        documents = documents if draw(st.booleans()) else sorted(set(documents))
    return Case(
        draw(st.integers(0, 10**6)),
        batch,
        length,
        draw(st.integers(1, 2)),
        widths,
        documents,
        pinned=draw(st.booleans()),
    )


@long_interpreter
@settings(max_examples=examples(8))
@given(case=cases(), data=st.data())
def test_equals_the_definition(where: str, case: Case, data: st.DataObject) -> None:
    recompute, chunk = data.draw(st.booleans()), data.draw(st.sampled_from([None, 32, 64]))
    chunk = chunk if chunk in chunk_sizes(where, case) else None
    assert_near(case.found(where, recompute=recompute, chunk=chunk), case.exact(), bar_of(where))


def test_equals_the_definition_at_the_widest(where: str) -> None:
    case = Case(1, 1, 33, 1, (128, 128), [0, 0, 33])
    assert_near(case.found(where), case.exact(), bar_of(where))


@long_interpreter
@pytest.mark.parametrize("pinned", [False, True])
def test_long_rows_stay_exact(where: str, pinned: bool) -> None:
    """Eight chunks of 64 and a rest; every decay at its bound is the worst case of log_w's gradient."""
    case = Case(2, 1, 530, 1, (64, 64), pinned=pinned)
    assert_near(case.found(where), case.exact(), bar_of(where))


@pytest.mark.gpu
def test_documents_in_groups_of_chunks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan of long documents (kernels/rwkv7/triton_groups.py), asked for at lengths that the definition takes."""
    kernels = importlib.import_module("cdrmix.kernels.rwkv7.triton")
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    monkeypatch.setattr(kernels, "GROUP", 2)
    monkeypatch.setattr(kernels, "LONGEST", 3)
    case = Case(3, 1, 600, 2, (64, 64), [0, 40, 40, 430, 600])
    assert_near(case.found("cuda"), case.exact(), BARS["triton"])


@long_interpreter
@settings(max_examples=examples(5))
@given(case=cases(widest=64))  # each takes three passes and their gradients
def test_what_is_saved_changes_no_bit_and_the_chunk_next_to_none(where: str, case: Case) -> None:
    small, large = case.found(where, chunk=32), case.found(where, chunk=chunk_sizes(where, case)[-1])
    assert_same_bits(small, case.found(where, chunk=32, recompute=True))
    assert_near(large, {name: value.double() for name, value in small.items()}, 2 * bar_of(where))


@long_interpreter
@settings(max_examples=examples(5))
@given(seed=st.integers(0, 10**6), length=st.integers(2, 80), data=st.data())
def test_two_calls_with_the_state_between_equal_one(where: str, seed: int, length: int, data: st.DataObject) -> None:
    """scan(x || y) = scan(y, state(scan x)), gradients through the state included."""
    cut, case, device = data.draw(st.integers(1, length - 1)), Case(seed, 1, length, 2, (32, 32)), device_of(where)
    leaves = [case.inputs[name].float().to(device).requires_grad_() for name in NAMES]
    *tokens, state = leaves
    first, between = ops.wkv7(*(x[:, :cut] for x in tokens), state=state, return_state=True)
    second, last = ops.wkv7(*(x[:, cut:] for x in tokens), state=between, return_state=True)
    y = torch.cat([first, second], 1)
    weights = [case.dy.float().to(device), case.dlast.float().to(device)]
    gradients = torch.autograd.grad([y, last], leaves, weights)
    found = {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}
    assert_near({name: value.detach().cpu() for name, value in found.items()}, case.exact(), bar_of(where))


@settings(max_examples=examples(5))
@given(seed=st.integers(0, 10**6), length=st.integers(2, 40), data=st.data())
def test_the_future_cannot_alter_the_past(where: str, seed: int, length: int, data: st.DataObject) -> None:
    """Earlier outputs give later tokens no gradient at all, and stay when the later tokens change.

    Not to the bit on a GPU: its exponents are centred on the chunk's middle, which a later decay moves.
    """
    cut, case, device = data.draw(st.integers(1, length - 1)), Case(seed, 1, length, 1, (32, 32)), device_of(where)
    leaves = [case.inputs[name].float().to(device).requires_grad_() for name in NAMES[:6]]
    before, _ = ops.wkv7(*leaves)
    for dx in torch.autograd.grad(before[:, :cut].square().sum(), leaves):
        assert dx[:, cut:].abs().max() == 0
    changed = [torch.cat([x[:, :cut], 0.5 * x[:, cut:]], 1).detach() for x in leaves]
    after, _ = ops.wkv7(*changed)
    change = (after - before.detach())[:, :cut].square().mean() / before.detach().square().mean()
    assert change.sqrt().item() <= bar_of(where)


@long_interpreter
@settings(max_examples=examples(5))
@given(case=cases())
def test_packed_documents_are_documents_apart_to_the_bit(where: str, case: Case) -> None:
    packed = case.found(where)
    batch, length = case.dy.shape[:2]
    starts = case.documents or list(range(0, (batch + 1) * length, length))
    tokens = [f"d{name}" for name in NAMES[:6]] + ["y"]
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            assert torch.equal(packed["last"][n].double(), case.inputs["state"][n])
            assert torch.equal(packed["dstate"][n].double(), case.dlast[n])
            continue
        alone = Case(0, 1, end - start, 1, (32, 32))
        flat = {name: value.flatten(0, 1)[None, start:end] for name, value in case.inputs.items() if name != "state"}
        alone.inputs = flat | {"state": case.inputs["state"][n : n + 1]}
        alone.dy, alone.dlast = case.dy.flatten(0, 1)[None, start:end], case.dlast[n : n + 1]
        apart = alone.found(where)
        for name in tokens:
            assert torch.equal(packed[name].flatten(0, 1)[start:end], apart[name][0]), name
        assert torch.equal(packed["last"][n], apart["last"][0])
        assert torch.equal(packed["dstate"][n], apart["dstate"][0])


@compiled
def test_thirty_times_the_same_bits(where: str) -> None:
    case = Case(5, 2, 45, 1, (32, 32), [0, 7, 45, 60, 90])
    first = case.found(where)
    for _ in range(29):
        assert_same_bits(first, case.found(where))


@compiled
def test_rows_do_not_know_their_neighbours(where: str) -> None:
    case, turned = Case(6, 3, 33, 1, (32, 64)), Case(6, 3, 33, 1, (32, 64))
    order = torch.tensor([2, 0, 1])
    turned.inputs = {name: value[order] for name, value in case.inputs.items()}
    turned.dy, turned.dlast = case.dy[order], case.dlast[order]
    assert_same_bits({name: value[order] for name, value in case.found(where).items()}, turned.found(where))


def test_strided_views_are_taken_as_they_are(where: str) -> None:
    case, device = Case(7, 1, 33, 2, (32, 32)), device_of(where)
    dense = [case.inputs[name].float().to(device) for name in NAMES]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense[:6]]
    wide = torch.cat([dense[6], dense[6]], -1)[..., :32]
    assert not any(x.is_contiguous() for x in (*strided, wide))
    leaves = [x.detach().requires_grad_() for x in (*strided, wide)]
    y, last = ops.wkv7(*leaves[:6], state=leaves[6], return_state=True)
    weights = [x.float().to(device).transpose(1, 2).contiguous().transpose(1, 2) for x in (case.dy, case.dlast)]
    gradients = torch.autograd.grad([y, last], leaves, weights)
    found = {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}
    assert_same_bits({name: value.detach().cpu() for name, value in found.items()}, case.found(where))


def test_only_what_is_wanted_is_differentiated(where: str) -> None:
    case, device = Case(8, 1, 20, 1, (32, 32)), device_of(where)
    whole = case.found(where)
    for wanted in (*NAMES, "nothing"):
        inputs = {name: value.float().to(device) for name, value in case.inputs.items()}
        if wanted != "nothing":
            inputs[wanted].requires_grad_()
        y, last = ops.wkv7(**inputs, return_state=True)
        assert last is not None
        assert torch.equal(y.detach().cpu(), whole["y"]), wanted
        assert y.requires_grad == (wanted != "nothing"), wanted
        if wanted != "nothing":
            (dx,) = torch.autograd.grad([y, last], inputs[wanted], [case.dy.to(y), case.dlast.to(y)])
            assert torch.equal(dx.cpu(), whole[f"d{wanted}"]), wanted


def test_a_step_is_the_scan_of_one_token(where: str) -> None:
    case, device = Case(9, 3, 1, 2, (32, 64)), device_of(where)
    r, log_w, k, v, a, b, state = (case.inputs[name].float().to(device) for name in NAMES)
    before = state.clone()
    tokens = [x[:, 0] for x in (r, log_w, k, v, a, b)]
    y, new = ops.wkv7_step(*tokens, state)
    exact = case.exact()
    assert_near({"y": y.cpu(), "new": new.cpu()}, {"y": exact["y"][:, 0], "new": exact["last"]}, bar_of(where))
    assert torch.equal(state, before)


@contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that torch.empty and its kin give lies between bands of 7s, which must be there still at the end."""
    band, buffers = 64, []

    def between(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        size = torch.Size(shape)
        buffer = torch.full((size.numel() + 2 * band,), 7, dtype=dtype, device=device)
        inner = buffer[band : band + size.numel()].view(size)
        inner.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
        buffers.append(buffer)
        return inner

    def flatten(shape: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        return between(flatten(shape), dtype, device)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return between(x.shape, dtype or x.dtype, device or x.device)

    def new_empty(x: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return between(flatten(shape), dtype or x.dtype, device or x.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        patch.setattr(Tensor, "new_empty", new_empty)
        yield
    assert buffers
    for buffer in buffers:
        assert bool((buffer[:band] == 7).all())
        assert bool((buffer[-band:] == 7).all())


@on("cpu", GPU)
@pytest.mark.parametrize("documents", [None, [0, 1, 1, 34, 35, 70]])
def test_nothing_is_written_outside(where: str, documents: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation's own functions, since the operator allocates nothing itself; results as without bands.

    test_wkv7_triton.py has the test for the interpreter. The reference allocates its results by PyTorch alone.
    """
    case, device = Case(10, 2, 35, 1, (64, 32), documents), device_of(where)
    kernels = recurrence._kernels(torch.empty(1, 1, 1, 64, device=device), torch.empty(1, 1, 1, 32, device=device))
    tensors = [case.inputs[name].float().to(device) for name in NAMES]
    dy, dlast, cu_seqlens = case.dy.float().to(device), case.dlast.float().to(device), case.cu_seqlens(device)
    wanted = case.found(where)
    for recompute in (False, True):
        with guarded(monkeypatch):
            y, last, saved = kernels.wkv7_forward(
                *tensors, cu_seqlens, chunk=None, save=True, recompute=recompute, return_state=True
            )
            gradients = kernels.wkv7_backward(dy, dlast, *tensors, cu_seqlens, saved, chunk=None, recompute=recompute)
        found = dict(zip(("y", "last", *(f"d{name}" for name in NAMES)), (y, last, *gradients), strict=True))
        assert_same_bits({name: value.cpu() for name, value in found.items()}, wanted)


def test_inputs_are_not_read_beyond_their_ends(where: str) -> None:
    """Between bands of NaN they give the same bits."""
    case, device = Case(11, 2, 37, 1, (32, 32), [0, 20, 37, 70, 74]), device_of(where)

    def banded(x: Tensor) -> Tensor:
        buffer = torch.full((x.numel() + 4096,), torch.nan, device=device)
        buffer[2048:-2048] = x.flatten()
        return buffer[2048:-2048].view(x.shape).requires_grad_()

    leaves = [banded(case.inputs[name]) for name in NAMES]
    y, last = ops.wkv7(*leaves[:6], state=leaves[6], cu_seqlens=case.cu_seqlens(device), return_state=True)
    gradients = torch.autograd.grad([y, last], leaves, [banded(case.dy).detach(), banded(case.dlast).detach()])
    found = {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}
    assert_same_bits({name: value.detach().cpu() for name, value in found.items()}, case.found(where))


@on("cpu", "reference", GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tensors_go_in_and_come_out(where: str, dtype: torch.dtype) -> None:
    """Computed in float32 on a CPU, so the output differs from the exact one by its own rounding alone.

    Narrow products of the interpreter are wrong; test_wkv7_triton.py rounds its operands instead.
    """
    case, device = Case(12, 2, 70, 2, (64, 64)), device_of(where)
    narrow = {name: value.to(dtype) for name, value in case.inputs.items() if name != "state"}
    case.inputs |= {name: value.double() for name, value in narrow.items()}
    leaves = {name: value.to(device).requires_grad_() for name, value in narrow.items()}
    state = case.inputs["state"].float().to(device).requires_grad_()
    y, last = ops.wkv7(**leaves, state=state, return_state=True)
    assert last is not None
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    case.dy = case.dy.to(dtype).double()
    inputs = [*leaves.values(), state]
    gradients = torch.autograd.grad([y, last], inputs, [case.dy.to(y), case.dlast.to(last)])
    assert [dx.dtype for dx in gradients] == [x.dtype for x in inputs]
    found = {"y": y, "last": last} | {f"d{name}": dx for name, dx in zip(NAMES, gradients, strict=True)}
    rounding = torch.finfo(dtype).eps / 2
    assert_near(
        {name: value.detach().cpu() for name, value in found.items()},
        case.exact(),
        7e-3 if where == "cuda" else rounding,
    )


def test_float64_is_served_by_the_reference(where: str) -> None:
    case, device = Case(13, 1, 30, 1, (32, 32)), device_of(where)
    inputs = {name: value.to(device) for name, value in case.inputs.items()}
    y, _ = ops.wkv7(**inputs)
    assert error(y.cpu(), case.exact()["y"]) < 1e-12
