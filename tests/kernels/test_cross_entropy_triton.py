"""The linear cross-entropy in Triton: in its interpreter, and on a GPU where there is one, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from guarded import UNCHANGED, guarded
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.cross_entropy import reference as reference_loss
from cdrmix.kernels.cross_entropy import triton as cross_entropy

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")

NAMES = ("losses", "dhidden", "dweight")
IGNORED = -100
# RMS ratios to float64. Float32: sums of at most 300 rounded products, through two products in a row. Bfloat16: logits,
# dlogits and results are rounded to nearest, 2^-9 / sqrt(3) = 1.1e-3 each; an error of a logit is one of its p.
FLOAT32, BFLOAT16 = 2e-6, 6e-3


@dataclasses.dataclass
class Case:
    """A call on one device: hidden [N, D], weight [V, D], targets and weights [K, N]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor | None
    z_loss: float
    label_smoothing: float

    def run(self, *, gradients: bool = True, reference: bool = False) -> list[Tensor]:
        """losses [K, N], dhidden, dweight."""
        module = reference_loss if reference else cross_entropy
        found = module.cross_entropy_forward(
            *(self.hidden, self.weight, self.targets, self.weights),
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            ignore_index=IGNORED,
            wants_hidden=gradients,
            wants_weight=gradients,
        )
        return list(found)

    def exact(self) -> list[Tensor]:
        hidden, weight = self.hidden.double(), self.weight.double()
        weights = None if self.weights is None else self.weights.double()
        return dataclasses.replace(self, hidden=hidden, weight=weight, weights=weights).run(reference=True)


def make(
    N: int,
    D: int,
    V: int,
    K: int = 1,
    *,
    weighted: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Logits of order 1; a quarter of the targets ignored and another of weight 0, where there are weights."""
    generator = torch.Generator().manual_seed(N + V)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / D**0.5
    targets, weights = torch.randint(0, V, (K, N), generator=generator), None
    if weighted:
        weights = torch.rand(K, N, generator=generator) - 0.25
        weights[:, 1::4] = 0
        targets[:, 2::4] = IGNORED
        weights = weights.to(device)
    return Case(
        hidden.to(device, dtype), weight.to(device, dtype), targets.to(device), weights, z_loss, label_smoothing
    )


def worse(found: list[Tensor], wanted: list[Tensor], bar: float) -> dict[str, float]:
    """The RMS ratios that are not below the bar."""
    ratios = {}
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert x.shape == y.shape, name
        ratios[name] = ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item()
    return {name: ratio for name, ratio in ratios.items() if not ratio < bar}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 logits and chunks of 16 rows, so that small shapes have several of each."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "ALIGNED", 16)
    monkeypatch.setattr(cross_entropy, "LEAST_CHUNK_BYTES", 0)


OPTIONS = [
    {},
    {"weighted": True},
    {"label_smoothing": 0.1},
    {"K": 3, "weighted": True, "z_loss": 0.01, "label_smoothing": 0.1},
]


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("N", "D", "V"), [(1, 3, 1), (21, 20, 67), (16, 8, 128), (5, 8, 201)])
def test_float32_equals_float64(N: int, D: int, V: int, options: dict[str, float]) -> None:
    case = make(N, D, V, **options)  # type: ignore[arg-type]
    found = case.run()
    assert all(x.isfinite().all() for x in found)
    if V > 1:  # of one token the loss is 0
        assert worse(found, case.exact(), FLOAT32) == {}
    assert torch.equal(case.run(gradients=False)[0], found[0])


@interpreted
def test_as_it_ships() -> None:
    """Blocks of 4,096 logits and one chunk."""
    case = make(5, 8, 5003, weighted=True)
    assert worse(case.run(), case.exact(), FLOAT32) == {}


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16(options: dict[str, float]) -> None:
    case = make(20, 20, 130, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
    found = case.run()
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert worse(found, case.exact(), BFLOAT16) == {}


@interpreted
@pytest.mark.usefixtures("small")
def test_rows_that_do_not_count_give_zeros_whatever_they_hold() -> None:
    case = make(21, 6, 70, 2, weighted=True, z_loss=0.01, label_smoothing=0.1)
    assert case.weights is not None
    case.targets[:, [0, 20]] = IGNORED
    case.weights[:, 7] = 0
    wanted = case.run()
    case.hidden[0], case.hidden[7], case.hidden[20] = torch.inf, torch.nan, -torch.inf
    found = case.run()
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert torch.equal(x, y), name
    assert (found[1][[0, 7, 20]] == 0).all()


@interpreted
@pytest.mark.usefixtures("small")
def test_chunks_change_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of small integers, which BLAS sums without rounding for any number of rows; gradients are none."""
    case = make(20, 4, 70, weighted=True)
    case.hidden, case.weight = case.hidden.round(), case.weight.mul(4).round()
    losses, dhidden, dweight = case.run()
    monkeypatch.setattr(cross_entropy, "ALIGNED", 64)
    other = case.run()
    assert torch.equal(losses, other[0])
    assert (other[1] - dhidden).norm() < FLOAT32 * dhidden.norm()
    assert (other[2] - dweight).norm() < FLOAT32 * dweight.norm()


@interpreted
@pytest.mark.usefixtures("small")
def test_repeats_have_the_same_bits() -> None:
    case = make(3, 6, 70, 2, weighted=True, z_loss=0.01)
    wanted = case.run()
    for _ in range(2):  # the interpreter is numpy in one thread
        for name, x, y in zip(NAMES, case.run(), wanted, strict=True):
            assert torch.equal(x, y), name


@interpreted
@pytest.mark.usefixtures("small")
def test_nothing_is_written_beside_the_results() -> None:
    """And rows of logits end where V does."""
    case = make(37, 8, 67, 2, weighted=True)
    wanted = case.run()
    with guarded(UNCHANGED) as memory:
        found = case.run()
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert torch.equal(x, y), name
    assert len(memory) == 4
    assert (memory[-1].view(-1, 128)[:, 67:] == UNCHANGED).all()


@interpreted
def test_no_rows() -> None:
    losses, dhidden, dweight = make(0, 4, 7).run()
    assert losses.shape == (1, 0)
    assert dhidden.shape == (0, 4)
    assert (dweight == 0).all()


@interpreted
def test_a_target_that_is_no_token_gives_nan_unread() -> None:
    case = make(4, 4, 7)
    case.targets[0, 1], case.targets[0, 2] = 7, -1
    losses, _, _ = case.run()
    assert losses.isnan().tolist() == [[False, True, True, False]]


@interpreted
@pytest.mark.usefixtures("small")
def test_the_operator_sends_it_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    case = make(37, 8, 67, weighted=True)
    assert case.weights is not None
    leaves = [case.hidden.requires_grad_(), case.weight.requires_grad_()]
    loss = ops.linear_cross_entropy(*leaves, case.targets[0], weights=case.weights[0])
    found = [x / 3 for x in torch.autograd.grad(loss, leaves)]
    case.hidden, case.weight = case.hidden.detach(), case.weight.detach()
    losses, *wanted = case.run()
    assert torch.equal(loss, losses.sum())
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y / 3)


def test_a_chunk_has_no_more_bytes_than_it_may() -> None:
    """At 8,192 rows, V 50,272: three quarters of what rounding the float32 sum takes, else half that sum's bytes, and
    never more than 2,048 rows."""
    N, D, V = cross_entropy.REFERENCE_SHAPE
    assert cross_entropy.chunk_rows(N, D, V, 2, rounded=True) * V * 2 <= 0.75 * V * D * 2
    assert cross_entropy.chunk_rows(N, D, V, 2, rounded=False) == 2048
    assert cross_entropy.chunk_rows(N, D, V, 4, rounded=False) == 1024
    assert cross_entropy.chunk_rows(N, 1024, V, 2, rounded=False) == 1024
    assert cross_entropy.chunk_rows(N, 12_288, V, 2, rounded=False) == 2048
    assert cross_entropy.chunk_rows(N, 12_288, V, 2, rounded=True) == 2048
    assert cross_entropy.chunk_rows(100, D, V, 2, rounded=True) == 100
    assert cross_entropy.chunk_rows(N, 128, 4096, 2, rounded=True) == 4096


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, BFLOAT16)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("N", "D", "V"), [(1, 64, 4096), (600, 256, 50_272), (333, 72, 5003)])
def test_on_a_gpu(N: int, D: int, V: int, options: dict[str, float], dtype: torch.dtype, bar: float) -> None:
    case = make(N, D, V, dtype=dtype, device="cuda", **options)  # type: ignore[arg-type]
    found = case.run()
    assert worse(found, case.exact(), bar) == {}
    for name, x, y in zip(NAMES, case.run(), found, strict=True):
        assert torch.equal(x, y), name
