"""RWKV-7's recurrence for CPUs against its definition in float64, and against itself bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cdrmix.kernels.rwkv7 import cpu as wkv7_cpu
from cdrmix.kernels.rwkv7 import reference

BAR = 2e-6  # RMS ratio to float64; rounding inputs of this kind to float32 alone costs 3e-8


def inputs(batch: int, length: int, heads: int, key_width: int, value_width: int, seed: int = 0) -> list[Tensor]:
    """r, log_w, k, v, a, b as RWKV-7 makes them: a unit removal key, decay above exp(-0.6065)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(batch, length, heads, width, generator=generator)

    removal = torch.nn.functional.normalize(normal(key_width), dim=-1)
    rate = torch.sigmoid(normal(key_width))
    log_w = -0.6065 * torch.sigmoid(normal(key_width))
    return [normal(key_width), log_w, normal(key_width), normal(value_width), -removal, removal * rate]


def run(
    tensors: list[Tensor],
    dy: Tensor,
    state: Tensor | None = None,
    dlast: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    recompute: bool = False,
) -> list[Tensor]:
    """y, last, and the gradients dr, dlog_w, dk, dv, da, db, dstate."""
    y, last, saved = wkv7_cpu.wkv7_forward(
        *tensors, state, cu_seqlens, chunk=chunk, save=True, recompute=recompute, return_state=True
    )
    gradients = wkv7_cpu.wkv7_backward(dy, dlast, *tensors, state, cu_seqlens, saved, chunk=chunk, recompute=recompute)
    return [y, last, *gradients]


def exact(tensors: list[Tensor], dy: Tensor, state: Tensor, dlast: Tensor, cu_seqlens: list[int]) -> list[Tensor]:
    """The definition in float64 on each document apart."""
    batch, length = dy.shape[:2]
    doubles = [x.double().requires_grad_() for x in [*tensors, state]]
    flat = [x.reshape(1, batch * length, *x.shape[2:]) for x in doubles[:-1]]
    pieces, lasts = [], []
    for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        last = doubles[-1][document : document + 1]
        if end > start:
            piece, last = reference.wkv7_recurrence(*[x[:, start:end] for x in flat], last)
            pieces.append(piece)
        lasts.append(last)
    y, last = torch.cat(pieces, 1).view(dy.shape), torch.cat(lasts)
    return [y, last, *torch.autograd.grad((y * dy).sum() + (last * dlast).sum(), doubles)]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    names = ("y", "last", "dr", "dlog_w", "dk", "dv", "da", "db", "dstate")
    ratios = {
        name: ((left.double() - right).norm() / right.norm()).item()
        for name, left, right in zip(names, found, wanted, strict=True)
    }
    assert all(ratio <= BAR for ratio in ratios.values()), ratios


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.fixture
def always_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, however little work there is."""
    monkeypatch.setattr(wkv7_cpu, "SERIAL_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("key_width", "value_width"), list(itertools.product((32, 64, 128), repeat=2)))
def test_every_width_equals_the_definition(key_width: int, value_width: int) -> None:
    tensors = inputs(2, 37, 2, key_width, value_width)
    dy, state = torch.randn(2, 37, 2, value_width), torch.randn(2, 2, value_width, key_width)
    dlast = torch.randn_like(state)
    assert_near(run(tensors, dy, state, dlast), exact(tensors, dy, state, dlast, [0, 37, 74]))


@pytest.mark.parametrize("log_w", [-0.6065, 0.0, -20.0, -1e4])
def test_every_decay_equals_the_definition(log_w: float) -> None:
    tensors = inputs(1, 128, 2, 64, 64)
    tensors[1].fill_(log_w)
    dy, state = torch.randn(1, 128, 2, 64), torch.randn(1, 2, 64, 64)
    dlast = torch.randn_like(state)
    found, wanted = run(tensors, dy, state, dlast), exact(tensors, dy, state, dlast, [0, 128])
    assert all(x.isfinite().all() for x in found)
    if log_w == -1e4:  # float64 says exactly 0, and of nothing there is no ratio
        assert found[3].abs().max() < 1e-30
        found[3] = wanted[3].float()
        wanted[3] = wanted[3] + 1
        found[3] += 1
    assert_near(found, wanted)


CU_SEQLENS = [0, 0, 1, 34, 34, 97, 100, 130, 130]  # empty documents, one token, longer than a row, block borders


def test_packed_documents_equal_the_definition_and_documents_apart_bitwise() -> None:
    tensors, dy = inputs(2, 65, 3, 32, 64), torch.randn(2, 65, 3, 64)
    state = torch.randn(len(CU_SEQLENS) - 1, 3, 64, 32)
    dlast = torch.randn_like(state)
    packed = run(tensors, dy, state, dlast, torch.tensor(CU_SEQLENS, dtype=torch.int32))
    assert_near(packed, exact(tensors, dy, state, dlast, CU_SEQLENS))
    flat = [x.view(1, 130, *x.shape[2:]) for x in tensors]
    for document, (start, end) in enumerate(itertools.pairwise(CU_SEQLENS)):
        here = slice(document, document + 1)
        of_document = [packed[1][here], packed[-1][here]]
        if end == start:
            assert_same(of_document, [state[here], dlast[here]])
            continue
        apart = run(
            [x[:, start:end].contiguous() for x in flat],
            dy.view(1, 130, 3, 64)[:, start:end].contiguous(),
            state[here],
            dlast[here],
        )
        assert_same([apart[1], apart[-1]], of_document)
        of_tokens = [packed[0], *packed[2:-1]]
        assert_same([apart[0], *apart[2:-1]], [x.view(1, 130, 3, -1)[:, start:end] for x in of_tokens])


def test_absent_states_are_zeros() -> None:
    tensors, dy = inputs(1, 40, 2, 32, 32), torch.randn(1, 40, 2, 32)
    cu_seqlens = torch.tensor([0, 17, 40])
    zeros = torch.zeros(2, 2, 32, 32)
    absent = run(tensors, dy, None, None, cu_seqlens)
    assert absent[-1].shape == (0,)
    assert_same(absent[:-1], run(tensors, dy, zeros, zeros, cu_seqlens)[:-1])


def test_what_is_not_wanted_is_not_made() -> None:
    tensors = inputs(2, 20, 2, 32, 64)
    y, last, saved = wkv7_cpu.wkv7_forward(
        *tensors, None, None, chunk=None, save=False, recompute=False, return_state=False
    )
    assert (last.shape, last.dtype, saved) == ((0,), torch.float32, [])
    assert torch.equal(y, run(tensors, torch.zeros_like(tensors[3]))[0])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 8, 16, 64])
def test_the_spacing_of_kept_states_alters_no_bit_and_their_shapes_are_known(
    chunk: int | None, recompute: bool
) -> None:
    tensors, dy = inputs(1, 50, 1, 32, 64), torch.randn(1, 50, 1, 64)
    cu_seqlens = torch.tensor([0, 9, 10, 50])
    for offsets, count in ((None, 1), (cu_seqlens, 3)):
        assert_same(
            run(tensors, dy, cu_seqlens=offsets), run(tensors, dy, cu_seqlens=offsets, chunk=chunk, recompute=recompute)
        )
        saved = wkv7_cpu.wkv7_forward(
            *tensors, None, offsets, chunk=chunk, save=True, recompute=recompute, return_state=False
        )[2]
        shapes = wkv7_cpu.wkv7_saved_shapes(
            1, 50, 1, 32, 64, count, offsets is not None, torch.float32, chunk=chunk, save=True, recompute=recompute
        )
        assert [(tuple(x.shape), x.dtype) for x in saved] == shapes


def test_thirty_repeats_and_any_number_of_threads_give_the_same_bits(always_threads: None) -> None:
    tensors, dy = inputs(3, 33, 3, 32, 32), torch.randn(3, 33, 3, 32)
    state = torch.randn(4, 3, 32, 32)
    cu_seqlens = torch.tensor([0, 50, 51, 51, 99])
    expected = run(tensors, dy, state, state, cu_seqlens)
    for repeat in range(30):
        torch.set_num_threads((1, 2, 3)[repeat % 3])
        assert_same(run(tensors, dy, state, state, cu_seqlens), expected)


def test_a_permuted_batch_gives_the_same_bits() -> None:
    tensors, dy, state = inputs(4, 21, 2, 64, 32), torch.randn(4, 21, 2, 32), torch.randn(4, 2, 32, 64)
    order = torch.tensor([2, 0, 3, 1])
    found = run([x[order] for x in tensors], dy[order], state[order], state[order])
    assert_same(found, [x[order] for x in run(tensors, dy, state, state)])


def test_a_token_at_a_time_equals_the_scan_bitwise() -> None:
    tensors, state = inputs(2, 19, 2, 64, 32), torch.randn(2, 2, 32, 64)
    y, last, _ = wkv7_cpu.wkv7_forward(
        *tensors, state, None, chunk=None, save=False, recompute=False, return_state=True
    )
    kept = state.clone()
    for t in range(19):
        y_t, state = wkv7_cpu.wkv7_step(*[x[:, t].contiguous() for x in tensors], state)
        assert torch.equal(y_t, y[:, t])
    assert torch.equal(state, last)
    assert not torch.equal(kept, last)


def test_several_threads_at_once(always_threads: None) -> None:
    tensors, dy = inputs(4, 64, 4, 32, 32), torch.randn(4, 64, 4, 32)
    expected = run(tensors, dy)
    wrong = []

    def repeat() -> None:
        torch.set_num_threads(2)  # a new thread starts from the environment's number
        for _ in range(20):
            found = run(tensors, dy)
            wrong.extend(1 for left, right in zip(found, expected, strict=True) if not torch.equal(left, right))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_after_use_in_the_parent(always_threads: None) -> None:
    tensors, dy = inputs(2, 20, 2, 32, 32), torch.randn(2, 20, 2, 32)
    expected = run(tensors, dy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork in a process of several threads
        child = os.fork()
    if child == 0:
        status = 1
        torch.utils.deterministic.fill_uninitialized_memory = False  # PyTorch's own threads do not survive the fork
        try:
            assert_same(run(tensors, dy), expected)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def python(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=False, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tensors)).hexdigest()


@pytest.mark.slow  # compiles; the quick tests have what was compiled before
def test_the_environment_sets_the_threads_and_no_folder_for_compiled_code_is_needed() -> None:
    """A fresh process with two OpenMP threads and nowhere to write: no warning, the same bits."""
    found = python(
        """
import hashlib, torch, numba.core.caching
numba.core.caching.CacheImpl._locator_classes = []
from cdrmix.kernels.rwkv7 import cpu as wkv7_cpu
wkv7_cpu.SERIAL_WORK = 0
assert torch.get_num_threads() == 2
generator = torch.Generator().manual_seed(5)
tensors = [torch.randn(2, 33, 2, 32, generator=generator) * 0.1 for _ in range(6)]
y, last, _ = wkv7_cpu.wkv7_forward(*tensors, None, None, chunk=None, save=False, recompute=False, return_state=True)
print(hashlib.sha256(y.numpy().tobytes() + last.numpy().tobytes()).hexdigest())
""",
        OMP_NUM_THREADS="2",
        MKL_NUM_THREADS="2",
    )
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(2, 33, 2, 32, generator=generator) * 0.1 for _ in range(6)]
    y, last, _ = wkv7_cpu.wkv7_forward(*tensors, None, None, chunk=None, save=False, recompute=False, return_state=True)
    assert found == digest([y, last])
