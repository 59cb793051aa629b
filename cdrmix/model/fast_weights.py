"""Plastic adapters: fast weights added to a block's projections and updated by the tokens (fast A, slow B).

For a projection W with input x, within a controller step c (a chunk of tokens):

    q_t = norm(K x_t), k_t = norm(K x_{t-1}), v_t = P x_t, beta_t = 2 sigmoid(eta) sigmoid(g . [x_{t-1}; x_t])
    y_t = W x_t + alpha B A_{c-1} q_t          reads the updates of earlier steps, but not of this one

After the last token, A_c = clamp(decay A_{c-1}, updated by the rule with k, v, beta): see `ops.plastic_chunks`. A key
comes from the token before its value, so that a query equal to a key finds the value that followed it. K, P, B, g and
eta are slow weights, trained by gradients through the updates. A is fast: float32, different for every row, and zeros
at a document's start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_reasoning import PlasticLora
from cdrmix.kernels.common.products import COLUMNS
from cdrmix.model.initial_values import by_inputs, drawn

NORM_FLOOR = 1e-6  # added to a key's squared length; the key of a document's first token, which has none, stays 0


class FastWeightOptions(NamedTuple):
    """A caller's options for the fast weights of a batch.

    cu_seqlens: int [E + 1] over the flattened tokens, where they are reset; None: at each document's start. scale_S:
    float32 [S], factors of the updates, one for each of S branches. Only the fast weights differ between branches; in
    the cache they have S in front, and the tokens must be of one chunk. See `cache.branch`.
    """

    cu_seqlens: Tensor | None = None
    scale_S: Tensor | None = None


class FastWeightSpan(NamedTuple):
    """How a batch updates the fast weights of all blocks.

    starts_BT: bool, where they are reset inside rows; None: nowhere. prefix: number of vectors before each row's
    tokens, which update nothing. scale_S: as in FastWeightOptions.
    """

    starts_BT: Tensor | None = None
    prefix: int = 0
    scale_S: Tensor | None = None


class PlasticState(NamedTuple):
    """What one adapter carries from token to token.

    a: float32 [B, r, d], committed. pending: the update so far of the unfinished chunk; decay * a at its start. last:
    [B, d + 1], of the last token, for the next token's key and rate. position: tokens of the chunk so far.
    """

    a: Tensor
    pending: Tensor
    last: Tensor
    position: int


class Adapted(NamedTuple):
    """The result of an adapter: y [B, P + T, O] and its new state's tensors.

    correlation: the mean of beta 1/2 |v - A k|^2; None without gradients, where nothing reads it.
    """

    y: Tensor
    a: Tensor
    pending: Tensor
    last: Tensor
    correlation: Tensor | None


class Adapter(nn.Module):
    """The slow weights of one adapted projection [O, I], and its forward pass.

    keys K: [d, I]; values P: [r, I]; up B: [O, r], initially zeros, so that a new adapter changes nothing; gate g:
    [2, I], of the token before and of this one; rate eta: [1].
    """

    def __init__(self, inputs: int, outputs: int, config: PlasticLora, chunk: int) -> None:
        super().__init__()
        self.config, self.chunk = config, chunk
        self.rank, self.width = config.rank, config.key_width or config.rank
        # Of variance 1 / inputs: inputs of variance 1 give keys and values of variance 1.
        self.keys = drawn(by_inputs(inputs, 3**0.5), self.width, inputs)
        self.values = drawn(by_inputs(inputs, 3**0.5), self.rank, inputs)
        self.up = nn.Parameter(torch.zeros(outputs, self.rank))
        self.gate = nn.Parameter(torch.zeros(2, inputs)) if config.gated else None
        self.rate = nn.Parameter(torch.zeros(1))  # not without dimensions, because DeepSpeed cannot send that

    def forward(self, x: Tensor, weight: Tensor, span: FastWeightSpan, state: PlasticState | None) -> Adapted:
        """x [B, P + T, I], the projection's input; weight [O, I].

        One token of each row, on a CPU and without gradients, is `ops.plastic_step`, everything else
        `ops.plastic_chunks`.
        """
        if state is not None and self._steps(x, span, state):
            return self._step(x, weight, state)
        (starts_BT, prefix, scale_S), width = span, self.width
        own = ops.linear(x, torch.cat(self._slow()))
        own = own if own.dtype == torch.float64 else own.float()
        gates = 0 if self.gate is None else 1
        carried, here, values = own.split([width + gates, gates, self.rank], -1)
        first = torch.zeros_like(carried[:, :1]) if state is None else state.last.unsqueeze(1).to(own.dtype)
        carried = torch.cat([carried[:, :prefix], first, carried[:, prefix:]] if prefix else [first, carried], 1)
        keys, before = _unit(carried[..., :width]), carried[:, prefix:-1, width:]
        k, q = keys[:, prefix:-1], keys[:, 1:]
        if prefix:
            q, here, values = (
                torch.cat([keys[:, :prefix], keys[:, prefix + 1 :]], 1),
                here[:, prefix:],
                values[:, prefix:],
            )
        if starts_BT is not None:
            k, before = (torch.where(starts_BT.unsqueeze(-1), 0.0, tensor) for tensor in (k, before))
        rate = 2 * torch.sigmoid(self.rate)
        if self.gate is None:
            beta = rate.to(own.dtype).expand(k.shape[:2])
        else:
            beta = rate * torch.sigmoid(before + here).squeeze(-1)
        if state is None:
            zeros = own.new_zeros(x.shape[0], self.rank, width)
            state = PlasticState(zeros, zeros, zeros, 0)
        scaled = beta if scale_S is None else (scale_S.to(beta)[:, None, None] * beta).clamp(max=2.0)
        made = ops.plastic_chunks(
            x,
            weight,
            self.up,
            q,
            k,
            values,
            scaled,
            state.a,
            state.pending,
            chunk=self.chunk,
            position=state.position,
            alpha=self.config.alpha,
            decay=self.config.decay,
            limit=self.config.clamp,
            rule=self.config.rule,
            starts=starts_BT,
            prefix=prefix,
        )
        correlation = None
        if torch.is_grad_enabled():
            with torch.set_grad_enabled(self.config.correlation_weight > 0):
                correlation = self._correlation(k, values, beta, made.reads_A, state.position)
        return Adapted(made.y, made.a, made.pending, carried[:, -1], correlation)

    def _slow(self) -> list[Tensor]:
        """The slow weights that are multiplied with the input, [d + 2g + r, I].

        The gate's part of the token before is beside the keys, because the next token needs both of this one.
        """
        return [self.keys, self.values] if self.gate is None else [self.keys, self.gate, self.values]

    def _steps(self, x: Tensor, span: FastWeightSpan, state: PlasticState) -> bool:
        """Whether x is one token of each row for `ops.plastic_step`."""
        return (
            x.shape[1] == 1
            and not torch.is_grad_enabled()
            and x.device.type == "cpu"
            and span.starts_BT is None
            and span.scale_S is None
            and x.dtype == self.rate.dtype == state.a.dtype == ops.compute_dtype(x)
            and state.pending.ndim == 3
        )

    def _step(self, x: Tensor, weight: Tensor, state: PlasticState) -> Adapted:
        """One token of each row."""
        config, (a, pending, last, position), slow = self.config, state, self._slow()
        # Unused rows make their number a multiple of 16: else `ops.linear` is two products and a copy, 7 us more.
        slow.append(self.keys[: -sum(map(len, slow)) % COLUMNS])
        own = ops.linear(x, torch.cat(slow))
        y_B1O = ops.linear(x, weight)
        made = ops.plastic_step(
            y_B1O.squeeze(1),
            own.squeeze(1),
            last,
            self.up,
            self.rate,
            a,
            pending,
            chunk=self.chunk,
            position=position,
            alpha=config.alpha,
            decay=config.decay,
            limit=config.clamp,
            rule=config.rule,
            floor=NORM_FLOOR,
        )
        return Adapted(y_B1O, made.a, made.pending, made.last, None)

    def _correlation(self, k: Tensor, v: Tensor, beta: Tensor, reads_A: Tensor, position: int) -> Tensor:
        """The mean over tokens of beta 1/2 |v - A k|^2, with the A that the token's chunk read.

        Its negative gradient in A is the delta rule's update of a token that finds this A.
        """
        tokens, chunks = k.shape[1], reads_A.shape[1]
        # A product for each chunk; of several, tokens of zeros fill the first and the last one.
        front, length = (position, self.chunk) if chunks > 1 else (0, tokens)
        filled = functional.pad(k, (0, 0, front, chunks * length - front - tokens)).unflatten(1, (chunks, length))
        read = (filled @ reads_A.mT).flatten(1, 2)[:, front : front + tokens]
        return (beta * (v - read).square().sum(-1)).mean() / 2


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_FLOOR)


class FastWeightUpdate:
    """One forward pass of one block's adapters: it computes the projections and collects the adapters' results."""

    def __init__(self, adapters: nn.ModuleDict, span: FastWeightSpan, state: tuple[PlasticState, ...] | None) -> None:
        self._adapters, self._span = adapters, span
        self._chunk = next(each.chunk for each in adapters.values() if isinstance(each, Adapter))
        self._before = dict(zip(adapters, state, strict=True)) if state is not None else {}
        self._after: dict[str, PlasticState] = {}
        self.correlation: Tensor | None = None  # summed over the projections

    def project(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """The projection `name` of its block's mixer."""
        if name not in self._adapters:
            return layer(x)
        adapter, state = self._adapters[name], self._before.get(name)
        y, a, pending, last, correlation = adapter(x, layer.weight, self._span, state)
        passed = (0 if state is None else state.position) + x.shape[1] - self._span.prefix
        self._after[name] = PlasticState(a, pending, last, passed % self._chunk)
        if correlation is not None:
            self.correlation = correlation if self.correlation is None else self.correlation + correlation
        return y

    def state(self) -> tuple[PlasticState, ...]:
        """The adapters' states, in their order."""
        return tuple(self._after[name] for name in self._adapters)


def make_adapters(kind: str, mixer: nn.Module, config: PlasticLora, chunk: int) -> nn.ModuleDict:
    """An adapter for each configured projection of a mixer of that kind, in the order of their names."""
    targets: dict[str, set[str]] = {"attention": set(config.attention), "rwkv7": set(config.rwkv7)}
    layers = {name: getattr(mixer, name) for name in sorted(targets.get(kind, set()))}
    adapters: dict[str, nn.Module] = {
        name: Adapter(layer.in_features, layer.out_features, config, chunk) for name, layer in layers.items()
    }
    return nn.ModuleDict(adapters)
