"""The plastic projection in Triton: in its interpreter, and on a GPU where there is one, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.fast_weights import reference as reference_plastic
from cdrmix.kernels.fast_weights import triton as plastic_lora

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernel needs a GPU")

# RMS ratios to float64. Float32: a sum of at most 400 products, 2^-24 each. Bfloat16: y is rounded once, from a sum in
# float32 of exact products, 2^-9 / sqrt(3) = 1.1e-3 at most and 1.7e-3 with the interpreter's inputs of few values.
FLOAT32, BFLOAT16 = 1e-6, 2.5e-3
# S, R, I, O, r
SHAPES = [
    (1, 37, 40, 72, 12),
    (3, 37, 40, 72, 12),
    (1, 1, 5, 3, 1),  # rows that are not aligned
    (2, 16, 64, 64, 16),  # whole tiles alone
    (1, 40, 33, 65, 128),
    (2, 17, 100, 130, 24),
]


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """x [R, I], w [O, I], b_up [O, r], reads [S, R, r] for a shape as in SHAPES: y of order 1."""
    generator = torch.Generator().manual_seed(0)
    branches, rows, inputs, outputs, rank = shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    w, b_up = normal(outputs, inputs) / inputs**0.5, normal(outputs, rank) / rank**0.5
    return [normal(rows, inputs), w, b_up, normal(branches, rows, rank)]


def error(found: Tensor, inputs: list[Tensor]) -> float:
    exact = reference_plastic.project_forward(*(x.double() for x in inputs))
    assert found.shape == exact.shape
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows, so that small shapes have several of each kind."""
    for key, launches in plastic_lora.LAUNCHES.items():
        one, several = (dataclasses.replace(x, block_m=16, block_n=64, block_k=32, group=2) for x in launches)
        monkeypatch.setitem(plastic_lora.LAUNCHES, key, (one, several))


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_projection_equals_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = make(shape, dtype=dtype)
    found = plastic_lora.project_forward(*inputs)
    assert found.dtype == dtype
    assert error(found, inputs) < (FLOAT32 if dtype == torch.float32 else BFLOAT16)


@interpreted
@pytest.mark.parametrize("branches", [1, 2])
def test_shipped_tiles_equal_float64(branches: int) -> None:
    inputs = make((branches, 140, 72, 280, 40))
    assert error(plastic_lora.project_forward(*inputs), inputs) < FLOAT32


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_of_zero_change_no_bit(dtype: torch.dtype) -> None:
    """A branch that reads nothing stores its accumulator unchanged, also next to branches that read, and with any B."""
    x, w, b_up, reads = make(SHAPES[1], dtype=dtype)
    reads[0] = 0
    both = plastic_lora.project_forward(x, w, b_up, reads)
    alone = plastic_lora.project_forward(x, w, b_up * 7, reads[:1].contiguous())
    assert torch.equal(both[0], alone[0])
    assert not torch.equal(both[1], alone[0])


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_nothing_is_written_beside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """y lies between guards of 256 bytes, which stay unchanged; memory outside the inputs is not read."""
    guarded: list[Tensor] = []

    def guard(x: Tensor, value: float) -> Tensor:
        whole = torch.full((x.numel() + 128,), value, dtype=x.dtype)
        whole[64:-64] = x.reshape(-1)
        guarded.append(whole)
        return whole[64:-64].view(x.shape)

    for shape in SHAPES:
        inputs = make(shape)
        wanted = plastic_lora.project_forward(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda size, *, dtype, device: guard(torch.zeros(size, dtype=dtype), 77.0))
            found = plastic_lora.project_forward(*(guard(x, float("nan")) for x in inputs))
        assert torch.equal(found, wanted)
        whole = guarded[-1]
        assert whole.numel() == found.numel() + 128
        assert bool((whole[:64] == 77).all())
        assert bool((whole[-64:] == 77).all())


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_repeats_have_the_same_bits() -> None:
    inputs = make(SHAPES[1])
    wanted = plastic_lora.project_forward(*inputs)
    for _ in range(3):
        assert torch.equal(plastic_lora.project_forward(*inputs), wanted)


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rule", "width"), [("delta", 12), ("delta", 70), ("hebb", 12), ("oja", 12)])
def test_the_operator_with_triton_is_near_float64(rule: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and all gradients through cdrmix.ops; the writes of narrow keys are wkv7's kernels, padded to 32."""
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    compare(rule, width, "cpu", torch.float32, 256 * torch.finfo(torch.float32).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rule", "width"), [("delta", 12), ("delta", 300), ("hebb", 12), ("oja", 12), ("oja", 300)])
def test_on_a_gpu_it_is_near_float64(rule: str, width: int, dtype: torch.dtype) -> None:
    """Bfloat16: the reads, y, and gradients on their way are rounded, up to four times 2^-9 of the largest value."""
    compare(rule, width, "cuda", dtype, 256 * torch.finfo(torch.float32).eps if dtype == torch.float32 else 2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1000, 512, 768, 16), (3, 1000, 512, 768, 16), (2, 300, 520, 264, 100)])
def test_the_projection_on_a_gpu_equals_float64(shape: tuple[int, ...]) -> None:
    for dtype, bar in ((torch.float32, 5e-6), (torch.bfloat16, BFLOAT16), (torch.float16, BFLOAT16 / 8)):
        inputs = make(shape, dtype=dtype, device="cuda")
        found = plastic_lora.project_forward(*inputs)
        assert error(found, inputs) < bar
        assert torch.equal(found, plastic_lora.project_forward(*inputs))
        # A row has its bits wherever it lies (not in the interpreter, whose products are BLAS's).
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0)).cuda()
        x, w, b_up, reads = inputs
        moved = plastic_lora.project_forward(x[order], w, b_up, reads[:, order].contiguous())
        assert torch.equal(moved, found[:, order])


def compare(rule: str, width: int, device: str, dtype: torch.dtype, bar: float) -> None:
    """y, A' and every gradient against the definition in float64, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1, 20, 40), "w": (72, 40), "b_up": (72, 12), "q": (1, 20, width), "k": (1, 20, width)}
    shapes |= {"v": (1, 20, 12), "beta": (2, 1, 20), "a_state": (12, width)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["beta"] = tensors["beta"].sigmoid()
    for name in ("k", "v"):
        tensors[name] = torch.nn.functional.normalize(tensors[name], dim=-1)
    found: list[list[Tensor]] = []
    for function, kind in ((ops.plastic_lora, dtype), (reference_plastic.plastic_lora_loop, torch.float64)):
        rounded = {n: x.to(device, torch.float32 if n == "a_state" else dtype) for n, x in tensors.items()}
        exact = {n: x.double() for n, x in rounded.items()}
        leaves = {n: x.requires_grad_() for n, x in (exact if kind == torch.float64 else rounded).items()}
        outputs = function(**leaves, alpha=0.5, decay=0.9, rule=rule)
        generator.manual_seed(1)
        weights = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, list(leaves.values()), weights)])
    for name, left, right in zip(("y", "a_next", *tensors), *found, strict=True):
        assert (left.double() - right).abs().max().item() <= bar * right.abs().max().item(), name


@pytest.mark.parametrize("arch", triton_helpers.ARCHITECTURES)
def test_every_rank_is_built(arch: str) -> None:
    assert len(plastic_lora.builds(arch)) == 3 * len(plastic_lora.RANKS) * 2
