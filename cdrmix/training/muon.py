"""Muon: the momentum of each matrix, orthogonalised, is its update; all other parameters have AdamW.

    m = momentum m + (1 - momentum) g;  u = (1 - momentum) g + momentum m        Nesterov
    o = U V^T  of  u = U S V^T, by polynomials of u                              `polar_factor`
    W -= lr (scale sqrt(max(rows, columns)) o + weight_decay W)

Momentum and orthogonalisation: https://kellerjordan.github.io/posts/muon. The factor sqrt(max(rows, columns)) gives an
update the root mean square `scale` (arXiv 2502.16982, section 2.2). Weight decay is cautious: only where the update has
the weight's sign (arXiv 2411.16085). An expert is a matrix, and so is each map of a fused matrix (`layers.Fused`).

DeepSpeed takes a class with the word in its name for its own optimizer, so the class here has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cdrmix.config.schema_optimizer import Optimizer
from cdrmix.kernels.common.products import mm, multiplies_on_one_thread
from cdrmix.model.layers import Fused

Polynomial = tuple[float, float, float]  # a, b, c of p(x) = a x + b x^3 + c x^5, applied to the singular values

# arXiv 2505.16932, algorithm 1 (Polar Express, lower bound 1e-3). All but the last of an iteration are applied to
# x / SAFETY, as in the algorithm, since rounding may leave a singular value slightly above 1.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),  # its limit, which every further step has
)
SAFETY = 1.01
JORDAN: Polynomial = (3.4445, -4.775, 2.0315)
MOST = 1 << 25  # elements of one batch of matrices: 128 MiB in float32, and two products of at most this size
MOMENTUM = "momentum"  # of a parameter in the optimizer's state: its shape and dtype


class Ownership(Protocol):
    """Which parameters this process updates, of those that several processes hold."""

    def mine(self, parameter: Tensor) -> bool:
        """Whether this process updates the parameter."""

    def exchange(self) -> None:
        """Gives every process the updated parameters of the others. All processes call."""


class OrthogonalizedMomentum(torch.optim.Optimizer):
    """Muon over the groups that have `matrices`, another optimizer over the rest.

    groups: of `optim.parameter_groups`; `matrices` has for each parameter its Fused, or None. Parameters are float32:
    [R, C], or [E, R, C] for E experts. rest: makes the optimizer of the groups without `matrices`. It shares the
    groups and the state of this one. ownership: set where processes share the work; None: this one updates all.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: Optimizer,
        rest: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        learning_rate: float,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self.settings = settings
        self.ownership: Ownership | None = None
        others = [group for group in self.param_groups if "matrices" not in group]
        self._rest = rest(others) if others else None
        if self._rest is not None:
            self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter with a gradient, by its group's `lr` and `weight_decay`."""
        assert closure is None, "the loss is computed once a step"
        if self.ownership is not None:
            for parameter in (each for group in self.param_groups for each in group["params"]):
                if not self.ownership.mine(parameter):
                    parameter.grad = None
        if self._rest is not None:
            self._rest.step()
        for group in self.param_groups:
            if "matrices" in group:
                self._update(group)
        if self.ownership is not None:
            self.ownership.exchange()

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [
            (parameter, fused)
            for parameter, fused in zip(group["params"], group["matrices"], strict=True)
            if parameter.grad is not None
        ]
        by_shape: dict[tuple[int, int], list[_Matrices]] = {}
        for parameter, fused in parameters:
            state = self.state[parameter]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(parameter)
            state[MOMENTUM].lerp_(parameter.grad, 1.0 - self.settings.momentum)
            for matrices in _split(parameter, parameter.grad, state[MOMENTUM], fused):
                by_shape.setdefault(tuple(matrices.weight.shape[1:]), []).append(matrices)  # type: ignore[arg-type]
        for shape, found in by_shape.items():
            for batch in _batches(found, max(1, MOST // (shape[0] * shape[1]))):
                self._update_batch(batch, group["lr"], group["weight_decay"])

    def _update_batch(self, batch: Sequence[_Matrices], rate: float, decay: float) -> None:
        settings = self.settings
        u_NRC = torch.cat([each.gradient.lerp(each.momentum, settings.momentum) for each in batch])
        dtype = torch.bfloat16 if settings.iteration_dtype == "bf16" else torch.float32
        rows, columns = u_NRC.shape[1:]
        update_NRC = polar_factor(u_NRC, polynomials(settings), dtype).mul_(settings.scale * max(rows, columns) ** 0.5)
        for each, update in zip(batch, update_NRC.split([len(each.weight) for each in batch]), strict=True):
            if decay:
                decayed = each.weight * (update * each.weight > 0) if settings.cautious else each.weight
                update = update.add(decayed, alpha=decay)
            each.weight.sub_(update, alpha=rate)


class _Matrices(NamedTuple):
    """Views [N, R, C] with R <= C of a parameter, its gradient and its momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor

    def part(self, first: int, end: int) -> _Matrices:
        return _Matrices(*(view[first:end] for view in self))


def _split(parameter: Tensor, gradient: Tensor, momentum: Tensor, fused: Fused | None) -> Iterator[_Matrices]:
    """The matrices of a parameter, those of equal shape together."""
    maps = [
        [view] if fused is None else fused.split(view) for view in (parameter.detach(), gradient.detach(), momentum)
    ]
    for views in zip(*maps, strict=True):
        stacked = [view if view.dim() == 3 else view.unsqueeze(0) for view in views]
        rows, columns = stacked[0].shape[1:]
        yield _Matrices(*(view if rows <= columns else view.mT for view in stacked))


def _batches(found: Sequence[_Matrices], most: int) -> Iterator[list[_Matrices]]:
    """The matrices in batches of at most `most`, in their order."""
    batch: list[_Matrices] = []
    free = most
    for matrices in found:
        first = 0
        while first < len(matrices.weight):
            end = min(first + free, len(matrices.weight))
            batch.append(matrices.part(first, end))
            first, free = end, free - (end - first)
            if not free:
                yield batch
                batch, free = [], most
    if batch:
        yield batch


def polynomials(settings: Optimizer) -> tuple[Polynomial, ...]:
    """The polynomials of the iterations, in their order."""
    count = settings.iterations
    if settings.coefficients == "jordan":
        return (JORDAN,) * count
    chosen = [POLAR_EXPRESS[min(number, len(POLAR_EXPRESS) - 1)] for number in range(count)]
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in chosen[:-1]]
    return (*safe, chosen[-1])


def polar_factor(x_NRC: Tensor, polynomials: Sequence[Polynomial], dtype: torch.dtype) -> Tensor:
    """The orthogonal polar factor U V^T of each matrix U S V^T, approximately: [N, R, C] with R <= C -> float32.

    Odd polynomials of the matrix bring its singular values near 1. They must not exceed 1 at the start. The usual
    divisor is the root of the sum of their squares; here it is the 8th root of the sum of their 8th powers, which is
    nearer to the largest and needs no further product. With the defaults, singular values above 1/1000 of the divisor
    end within 15 % of 1. A matrix of zeros stays so. One that is not finite gives NaN and changes no other. dtype: of
    the products. The bits do not depend on the number of CPU threads, nor on a CPU on the other matrices.
    """
    largest = x_NRC.abs().amax((-2, -1), keepdim=True)
    x = (x_NRC / largest.clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
    for number, (a, b, c) in enumerate(polynomials):
        gram = _products(x, x.mT)
        square = _products(gram, gram)
        if number == 0:
            # Rows first: a sum over all elements would be divided among threads.
            rows = torch.linalg.vector_norm(square.float(), dim=-1, keepdim=True)
            norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True) ** 0.25
            divisor = (SAFETY * norm).clamp_min(1.0)  # the largest element is 1, so the norm is at least 1, or 0
            x, gram, square = (y.div_(divisor**power) for y, power in ((x, 1), (gram, 2), (square, 4)))
        x = _products(square.mul_(c).add_(gram, alpha=b), x).add_(x, alpha=a)
    return x.float()


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left [N, A, B] @ right [N, B, C]."""
    if left.device.type != "cpu" or not multiplies_on_one_thread():
        return torch.bmm(left, right)
    out = left.new_empty(len(left), left.shape[1], right.shape[2])
    for number in range(len(left)):  # MKL's batched product would run on one thread
        mm(left[number], right[number], out=out[number])
    return out
