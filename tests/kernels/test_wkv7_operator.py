"""What the recurrence refuses, how it chooses an implementation, and that torch.compile passes through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.errors import ConfigError
from cdrmix.kernels.common import chunks


def arguments(dtype: torch.dtype = torch.float32, width: int = 32, heads: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    names = ("r", "log_w", "k", "v", "a", "b")
    tensors = {name: torch.randn(2, 5, heads, width, generator=generator).to(dtype) for name in names}
    return tensors | {"log_w": -tensors["log_w"].abs()}


def starts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": torch.zeros(2, 5, 3)}, r"r must be \[B, T, H, width\].*found \[2, 5, 3\]"),
        ({"k": torch.zeros(2, 5, 3, 64)}, r"k is \[2, 5, 3, 64\], but r is \[2, 5, 3, 32\]"),
        ({"v": torch.zeros(2, 4, 3, 32)}, r"v is \[2, 4, 3, 32\].*all but the width must agree"),
        ({name: torch.zeros(0, 5, 3, 32) for name in ("r", "log_w", "k", "v", "a", "b")}, "none of them 0"),
        ({"a": torch.zeros(2, 5, 3, 32, dtype=torch.int64)}, "a is torch.int64; allowed are bfloat16"),
        ({"b": torch.zeros(2, 5, 3, 32, dtype=torch.bfloat16)}, "b is torch.bfloat16, but r is torch.float32"),
        ({"log_w": torch.zeros(2, 5, 3, 32, dtype=torch.bfloat16)}, "log_w may be float32 instead"),
        ({"k": torch.zeros(2, 5, 3, 32, device="meta")}, "k is on meta, but r is on cpu"),
        ({"state": torch.zeros(1, 3, 32, 32)}, r"state must be torch.float32 \[N, H, V, K\] = \[2, 3, 32, 32\]"),
        ({"state": torch.zeros(2, 3, 32, 32).bfloat16()}, "found torch.bfloat16"),
        ({"state": torch.zeros(2, 3, 32, 32), "cu_seqlens": starts(0, 2, 5, 10)}, r"= \[3, 3, 32, 32\]"),
        (
            {"cu_seqlens": torch.tensor([0.0, 10.0])},
            "found torch.float32",
        ),
        ({"cu_seqlens": starts(0)}, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": starts(0, 5, 9)}, r"end with B \* T = 10; found 0 ... 9"),
        ({"cu_seqlens": starts(1, 5, 10)}, "begin with 0"),
        ({"cu_seqlens": starts(0, 7, 5, 10)}, "must not decrease; found 7 then 5 at position 2"),
        ({"cu_seqlens": starts(0, 3, 10)}, "every row's start, multiples of T = 5; 5 is not there"),
        ({"recompute": "min"}, "recompute must be True or False; found 'min'"),
        ({"recompute": 1}, "recompute must be True or False; found 1"),
        ({"r": None}, "r must be a torch.Tensor; found NoneType"),
        ({"cu_seqlens": [0, 5, 10]}, "cu_seqlens must be a torch.Tensor; found list"),
        (
            {name: x.double() for name, x in arguments().items() if name != "log_w"},
            "log_w is torch.float32, but r is torch.float64",
        ),
        ({"chunk": 48}, r"chunk=48; choose one of \(16, 32, 64\)"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.wkv7(**(arguments() | changes))


@pytest.mark.parametrize(
    ("value", "message"), [(0.25, "log_w must be at most 0, a decay; its largest value is 0.25"), (torch.nan, "NaN")]
)
def test_values_are_checked_when_debugging(value: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments()
    inputs["log_w"][1, 2, 0, 3] = value
    ops.wkv7(**inputs)  # reading values would wait for a GPU: it is not done unasked
    monkeypatch.setenv("CDRMIX_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        ops.wkv7(**inputs)


def test_decays_that_a_gpu_cannot_hold_are_found_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments() | {"log_w": torch.full((2, 5, 3, 32), -5.0)}
    monkeypatch.setenv("CDRMIX_DEBUG", "1")
    ops.wkv7(**inputs)  # a CPU's kernel has no such bound
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    with pytest.raises(ValueError, match=r"log_w must stay above -5 for chunks of 32; its least value is -5"):
        ops.wkv7(**inputs, chunk=32)
    inputs["log_w"] += 0.5
    y, _ = ops.wkv7(**inputs, chunk=32)
    assert bool(y.isfinite().all())


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="the tensors are on a CPU: unset it"):
        ops.wkv7(**arguments())


def test_widths_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the reference takes them; for Triton they are refused by name."""
    inputs = arguments(width=16)
    on_cpu, _ = ops.wkv7(**inputs)
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    assert torch.equal(on_cpu, ops.wkv7(**inputs)[0])
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    with pytest.raises(ValueError, match="key width 16, value width 16; the GPU's kernels have"):
        ops.wkv7(**inputs)


def test_the_step_takes_one_token_and_no_gradient() -> None:
    inputs = arguments()
    state = torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"wkv7_step: r must be \[B, H, width\], one token"):
        ops.wkv7_step(*inputs.values(), state)
    token = [x[:, 0].requires_grad_() for x in inputs.values()]
    with pytest.raises(ValueError, match="wkv7_step has no gradient"):
        ops.wkv7_step(*token, state)
    with pytest.raises(ValueError, match="state must be"), torch.no_grad():
        ops.wkv7_step(*token, state[:1])


def test_the_environment_chooses_and_cannot_be_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert ops.backend(x) == "cpu"
    assert ops.backend(x.double()) == "reference"
    for name in ("triton", "cpu", "reference"):
        monkeypatch.setenv("CDRMIX_BACKEND", name)
        assert ops.backend(x) == name
    monkeypatch.setenv("CDRMIX_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"CDRMIX_BACKEND='cuda'.*triton, cpu, reference"):
        ops.backend(x)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_is_registered_as_pytorch_wants_it(
    backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema, fake tensors and autograd registration agree with what the operator does."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = [x.requires_grad_() for x in arguments(heads=1).values()]
    cu_seqlens = starts(0, 3, 5, 10) if packed else None
    state = torch.randn(3 if packed else 2, 1, 32, 32, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for flags in ((False, False), (True, True), (True, False)):  # save, recompute
        torch.library.opcheck(
            torch.ops.cdrmix.wkv7.default, (*inputs, state, cu_seqlens, None, *flags, True), test_utils=checks
        )
    token = [x.detach()[:, 0].contiguous() for x in inputs]
    torch.library.opcheck(torch.ops.cdrmix.wkv7_step.default, (*token, torch.zeros(2, 1, 32, 32)), test_utils=checks)


@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_compile_passes_through_without_a_break(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = {name: x.requires_grad_() for name, x in arguments().items()}

    def model(cu_seqlens: Tensor, **inputs: Tensor) -> Tensor:
        y, last = ops.wkv7(**inputs, cu_seqlens=cu_seqlens, return_state=True)
        assert last is not None
        return (y * 2).square().sum() + last.sum()

    cu_seqlens = starts(0, 3, 5, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for loss in (compiled(cu_seqlens, **inputs), model(cu_seqlens, **inputs)):
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        assert all(bool(dx.isfinite().all()) for dx in gradients)
        torch.testing.assert_close(loss, model(cu_seqlens, **inputs), rtol=0, atol=0)
    torch._dynamo.reset()


def test_layers_of_a_batch_share_one_table_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    made: list[int] = []
    make = chunks._make_table
    monkeypatch.setattr(chunks, "_make_table", lambda starts, slots, C: made.append(C) or make(starts, slots, C))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    r, k, v, a, b = (torch.randn(1, 8, 1, 32, generator=generator).requires_grad_() for _ in range(5))
    log_w = torch.full((1, 8, 1, 32), -0.3)

    def both_passes() -> torch.Tensor:
        y, _ = ops.wkv7(r, log_w, k, v, a * 0.1, b * 0.1, cu_seqlens=starts)
        torch.autograd.grad(y.sum(), r)
        return y.detach()

    first, second = both_passes(), both_passes()
    assert torch.equal(first, second)
    assert made == [32], "made once for two layers, forward and backward"
    starts[1] = 5
    assert not torch.equal(both_passes(), first)
    assert made == [32, 32], "the starts have changed"
