"""Implementations of a projection with a low-rank term: cdrmix's plastic one, a token loop, plain LoRA, none.

Each takes its own tensors by name and returns y, and the next A if it computes one. `step` is plastic_lora or its
definition in float64, so that the same layer gives the exact result too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.kernels.fast_weights import reference as reference_plastic

OURS = "cdrmix"
LOOP = "PyTorch, token by token"
LORA = "PyTorch, plain LoRA"
PROJECTION = "PyTorch, the projection alone"
ALPHA = 0.5  # of all of them
DECAY = 0.95

Step = Callable[..., tuple[Tensor, Tensor]]
Call = Callable[[dict[str, Tensor], Step, str], tuple[Tensor, ...]]  # tensors, step, rule -> y, and A' if there is one


@dataclass(frozen=True)
class Implementation:
    """A function to be measured, the names of the tensors that it takes and differentiates, and its step."""

    call: Call
    names: tuple[str, ...]
    step: Step = ops.plastic_lora


def update(tensors: dict[str, Tensor], step: Step, rule: str) -> tuple[Tensor, ...]:
    """Queries, keys, values and rates are given."""
    return step(**tensors, alpha=ALPHA, decay=DECAY, rule=rule)


def layer(tensors: dict[str, Tensor], step: Step, rule: str) -> tuple[Tensor, ...]:
    """With queries, keys, values and rates computed from x by one product; narrow keys are projected, wide ones are x.

    q_t is the key divided by its norm, k_t the one before it, beta_t = sigmoid(g x_{t-1} + h x_t).
    """
    x, weights, rank = tensors["x"], tensors["w_inner"], tensors["b_up"].shape[1]
    narrow = len(weights) == 2 * rank + 2
    v, *key, old, new = functional.linear(x, weights).split([rank] * (1 + narrow) + [1, 1], -1)
    q = functional.normalize(key[0] if narrow else x, dim=-1)
    k, old = (functional.pad(tensor[..., :-1, :], (0, 0, 1, 0)) for tensor in (q, old))
    given = {name: tensors[name] for name in ("x", "w", "b_up", "a_state")}
    beta = (old + new).squeeze(-1).sigmoid()
    return step(**given, q=q, k=k, v=v, beta=beta, alpha=ALPHA, decay=DECAY, rule=rule)


def lora(tensors: dict[str, Tensor], step: Step, rule: str) -> tuple[Tensor, ...]:
    """As in PEFT's layer: the scaled low-rank product added to the projection."""
    low = functional.linear(functional.linear(tensors["x"], tensors["a_down"]), tensors["b_up"])
    return (functional.linear(tensors["x"], tensors["w"]) + ALPHA * low,)


def projection(tensors: dict[str, Tensor], step: Step, rule: str) -> tuple[Tensor, ...]:
    return (functional.linear(tensors["x"], tensors["w"]),)


def implementations(layered: bool) -> dict[str, Implementation]:
    """The implementations that can be measured, ours first. layered: with the projections of q, k, v and beta."""
    call, names = (
        (layer, ("x", "w", "b_up", "w_inner", "a_state"))
        if layered
        else (update, ("x", "w", "b_up", "q", "k", "v", "beta", "a_state"))
    )
    return {
        OURS: Implementation(call, names),
        LORA: Implementation(lora, ("x", "w", "a_down", "b_up")),
        PROJECTION: Implementation(projection, ("x", "w")),
        LOOP: Implementation(call, names, reference_plastic.plastic_lora_loop),
    }
