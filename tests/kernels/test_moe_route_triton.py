"""Routing of the mixture of experts in Triton: in its interpreter, and on a GPU where there is one, against float64."""

from __future__ import annotations

import pytest
import torch

from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe import triton_route as moe_route

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")

ROUTES = [
    (300, 8, 2, None, True),
    (300, 8, 2, 60, False),
    (1, 4, 1, None, False),
    (70, 5, 3, 30, True),
    (33, 256, 4, 1, True),
    (9, 3, 3, 0, False),
    (7, 1, 1, None, False),
]


def kept(T: int, share: float | None) -> torch.Tensor | None:
    """A mask of about that share of the tokens; None: no token is skipped."""
    return None if share is None else torch.rand(T, generator=torch.Generator().manual_seed(T)) < share


@interpreted
@pytest.mark.parametrize("share", [None, 0.7, 0.0])
@pytest.mark.parametrize(("T", "E", "k", "capacity", "with_bias"), ROUTES)
def test_routing_equals_float64(
    T: int, E: int, k: int, capacity: int | None, with_bias: bool, share: float | None
) -> None:
    """Every fourth token has logits of small integers, so that some are tied. share: of the tokens that are kept."""
    keep = kept(T, share)
    generator = torch.Generator().manual_seed(T)
    logits = torch.randn(T, E, generator=generator)
    logits[::4] = logits[::4].round()
    bias = torch.randn(E, generator=generator).mul(4).round() / 4 if with_bias else None
    found = moe_route.route_forward(logits, k, bias, capacity, keep)
    doubles = logits.double()
    wanted = reference_moe.route_forward(doubles, k, None if bias is None else bias.double(), capacity, keep)
    for name, x, y in zip(reference_moe.Routing.__annotations__, found, wanted, strict=True):
        assert x.dtype == (torch.int64 if y.dtype == torch.int64 else torch.float32), name
        assert x.shape == y.shape, name
        # Logits of at most 5 in exponentials good to 2 ulp, in sums of at most 300 terms.
        assert torch.equal(x, y) if x.dtype == torch.int64 else torch.allclose(x.double(), y, rtol=2e-6), name

    dweights, balance, z = torch.randn(T, k, generator=generator), torch.tensor(0.3), torch.tensor(0.7)
    if keep is not None:
        dweights[~keep] = 0  # as of dropped routes
    for given in ((dweights, balance, z), (dweights, None, None), (None, balance, None), (None, None, z)):
        exact = [None if x is None else x.double() for x in given]
        gradient = moe_route.route_backward(*given, logits, found[1], found[3], k, keep)
        right = reference_moe.route_backward(*exact, doubles, wanted[1], wanted[3], k, keep)
        assert (gradient.double() - right).norm() <= 2e-6 * (right.norm() + 0.01)  # f all equal: the balance's cancels
    assert (moe_route.route_backward(None, None, None, logits, found[1], found[3], k) == 0).all()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_not_finite_route_somewhere() -> None:
    """-inf is a logit like others; with NaN weights are NaN, but every index is in range, each expert taken once."""
    logits = torch.zeros(6, 4)
    logits[0] = torch.tensor([float("-inf"), 1.0, float("-inf"), float("-inf")])
    logits[1] = float("nan")
    logits[2, 3] = float("nan")
    weights, experts, counts, _, order, _, _ = moe_route.route_forward(logits, 2, None, None)
    assert experts[:3].tolist() == [[1, 0], [0, 1], [3, 0]]
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights.isnan().any(1).tolist() == [False, True, True, False, False, False]
    assert sorted(order.tolist()) == list(range(12))
    assert counts.sum() == 12


@interpreted
def test_no_tokens_are_routed_nowhere() -> None:
    logits = torch.zeros(0, 4)
    found = moe_route.route_forward(logits, 2, None, None)
    wanted = reference_moe.route_forward(logits, 2, None, None)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert moe_route.route_backward(None, found[5], None, logits, found[1], found[3], 2).shape == (0, 4)


@interpreted
def test_more_experts_than_a_tile_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="use fewer experts"):
        moe_route.route_forward(torch.zeros(2, 257), 2, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.parametrize(("T", "E", "k", "capacity", "with_bias"), [*ROUTES, (32768, 8, 2, 10000, True)])
def test_routing_on_a_gpu(T: int, E: int, k: int, capacity: int | None, with_bias: bool, share: float | None) -> None:
    keep = kept(T, share)
    generator = torch.Generator().manual_seed(T)
    logits = torch.randn(T, E, generator=generator)
    bias = torch.randn(E, generator=generator).mul(4).round() / 4 if with_bias else None
    on_gpu = [None if x is None else x.cuda() for x in (bias, keep)]
    found = moe_route.route_forward(logits.cuda(), k, on_gpu[0], capacity, on_gpu[1])
    wanted = reference_moe.route_forward(logits.double(), k, None if bias is None else bias.double(), capacity, keep)
    for name, x, y in zip(reference_moe.Routing.__annotations__, found, wanted, strict=True):
        # The approximate exponential of a GPU is good to 2^-21.
        close = torch.equal(x.cpu(), y) if x.dtype == torch.int64 else torch.allclose(x.cpu().double(), y, rtol=5e-6)
        assert close, name
