"""What the plastic update refuses, and that its operators are registered as PyTorch wants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.ops import fast_weights as plastic

STEP: dict[str, Any] = {"alpha": 0.5, "decay": 1.0}


def arguments(width: int = 4, tokens: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (2, tokens, 6),
        "w": (7, 6),
        "b_up": (7, 4),
        "q": (2, tokens, width),
        "k": (2, tokens, width),
        "v": (2, tokens, 4),
        "beta": (2, tokens),
        "a_state": (2, 4, width),
    }
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(6)}, r"x must be \[\*, T, I\], none of them 0; found \[6\]"),
        ({"w": torch.zeros(1, 7, 6)}, r"w must be \[O, I\]"),
        ({"beta": torch.zeros(2, 0)}, r"beta must be \[\*, T\], none of them 0; found \[2, 0\]"),
        ({"w": torch.zeros(7, 5)}, r"w is \[7, 5\], but must end with \[O, I\] = \[7, 6\]"),
        ({"b_up": torch.zeros(6, 4)}, r"b_up is \[6, 4\], but must end with \[O, r\] = \[7, 4\]"),
        ({"k": torch.zeros(2, 5, 3)}, r"k is \[2, 5, 3\], but must end with \[T, d\] = \[5, 4\]"),
        ({"v": torch.zeros(2, 6, 4)}, r"v is \[2, 6, 4\], but must end with \[T, r\] = \[5, 4\]"),
        ({"beta": torch.zeros(2, 4)}, r"beta is \[2, 4\], but must end with \[T\] = \[5\]"),
        ({"a_state": torch.zeros(5, 4)}, r"a_state is \[5, 4\], but must end with \[r, d\] = \[4, 4\]"),
        ({"starts": torch.zeros(2, 6, dtype=torch.bool)}, r"starts is \[2, 6\], but must end with \[T\] = \[5\]"),
        ({"starts": torch.zeros(2, 5)}, "starts is torch.float32; it must be bool"),
        ({"q": torch.zeros(3, 5, 4)}, r"leading dimensions must broadcast.*x \[2\], q \[3\]"),
        ({"a_state": torch.zeros(4, 4).bfloat16()}, "a_state is torch.bfloat16; it must be torch.float32"),
        ({"w": torch.zeros(7, 6).bfloat16()}, "w is torch.bfloat16, but x is torch.float32: one dtype, or autocast"),
        ({"q": torch.zeros(2, 5, 4).double()}, "q is torch.float64, but x is torch.float32.*or float64 for all"),
        ({"v": torch.zeros(2, 5, 4).long()}, "v is torch.int64"),
        ({"k": torch.zeros(2, 5, 4, device="meta")}, "k is on meta, but x is on cpu"),
        ({"beta": None}, "beta must be a torch.Tensor; found NoneType"),
        ({"rule": "ojas"}, "rule='ojas'; choose one of hebb, delta, oja"),
        ({"alpha": float("nan")}, "alpha must be a finite number; found nan"),
        ({"alpha": "1"}, "alpha must be a number; found str"),
        ({"decay": 1.5}, "decay must be from 0 to 1, a factor of A; found 1.5"),
        (
            {
                "b_up": torch.zeros(7, 129),
                **dict.fromkeys(("q", "k", "v"), torch.zeros(2, 5, 129)),
                "a_state": torch.zeros(129, 129),
            },
            "b_up has rank 129; ranks are 1 to 128",
        ),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"plastic_lora: .*{message}"):
        ops.plastic_lora(**(arguments() | STEP | changes))


@pytest.mark.parametrize(
    ("a", "limit", "message"),
    [
        ([1.0], 2.0, "a must be float32 or float64.*found list"),
        (torch.zeros(3), 2.0, r".*found torch.float32 \[3\]"),
        (torch.zeros(3, 3).half(), 2.0, r".*found torch.float16 \[3, 3\]"),
        (torch.zeros(3, 3), 0.0, "limit must be a finite number above 0; found 0.0"),
    ],
)
def test_commit_names_wrong_arguments(a: Any, limit: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"plastic_commit: {message}"):
        ops.plastic_commit(a, limit)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_the_operators_are_registered_as_pytorch_wants_them(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake tensors and autograd registration agree with what the operators do."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, w, b_up = torch.randn(5, 6), torch.randn(7, 6), torch.randn(7, 4)
    for branches in (1, 3):
        reads = torch.randn(branches, 5, 4)
        inputs = [tensor.clone().requires_grad_() for tensor in (x, w, b_up, reads)]
        torch.library.opcheck(torch.ops.cdrmix.plastic_project.default, inputs, test_utils=checks)
        for wanted in ([True] * 4, [False, True, False, True]):
            backward = (torch.randn(branches, 5, 7), x, w, b_up, reads, wanted)
            torch.library.opcheck(torch.ops.cdrmix.plastic_project_backward.default, backward, test_utils=checks)
    k, v, beta, state = torch.randn(2, 70, 9), torch.randn(2, 70, 3), torch.rand(2, 70), torch.randn(2, 3, 9)
    tensors = [tensor.clone().requires_grad_() for tensor in (k, v, beta, state)]
    for save in (True, False):
        torch.library.opcheck(torch.ops.cdrmix.plastic_delta.default, (*tensors, save), test_utils=checks)
    _, saved = plastic._plastic_delta(k, v, beta, state, True)
    torch.library.opcheck(
        torch.ops.cdrmix.plastic_delta_backward.default, (torch.randn_like(state), k, v, beta, saved), test_utils=checks
    )


@pytest.mark.parametrize(("backend", "width"), [("cpu", 4), ("cpu", 70), ("triton", 70), ("reference", 4)])
def test_compile_passes_through_without_a_break(backend: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = {name: x.requires_grad_() for name, x in arguments(width).items()}
    starts = torch.arange(5) == 3

    def model(**inputs: Tensor) -> Tensor:
        y, a_next = ops.plastic_lora(**inputs, **STEP, starts=starts)
        return (y * 2).square().sum() + ops.plastic_commit(a_next).square().sum()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(model(**inputs), list(inputs.values()))
    found = torch.autograd.grad(compiled(**inputs), list(inputs.values()))
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
