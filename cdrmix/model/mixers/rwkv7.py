"""The RWKV-7 time-mix block (arXiv 2503.14456), with the parameters, names and initialisation of the release."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.initial_values import drawn, orthogonal, zeros
from cdrmix.model.layers import elementwise, linear
from cdrmix.model.mixers.base import MIXERS, Mixed, Mixer
from cdrmix.model.sequence import SequenceSlice
from cdrmix.model.tensor_parallel import Cut
from cdrmix.ops.checks import state_dtype


class TimeMixCache(NamedTuple):
    """What generation carries: the last token's normed input [B, D] and the recurrence's state [B, H, V, K].

    Of packed rows B is the number of documents.
    """

    last_BD: Tensor
    wkv_BHVK: Tensor


@MIXERS("rwkv7")
class TimeMix(Mixer):
    """RWKV-7's mixer: token shift, six data-dependent streams, the generalised delta rule, norm, bonus and gate.

    The transition of a token's state is diag(w) - c kappa^T (rate * kappa), with kappa the unit key and rate in (0, 1)
    (arXiv 2503.14456, appendix D). c is 1, and 2 with `allow_neg_eigval`, which lets eigenvalues reach -1.
    """

    part = "time-mix"

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        width, rwkv = config.d_model, config.rwkv
        self.head_size, self.heads = rwkv.head_size, width // rwkv.head_size
        self.allow_neg_eigval = rwkv.allow_neg_eigval
        depth = layer / max(config.layers - 1, 1)  # 0 in the first block, 1 in the last
        fade = 1 - layer / config.layers
        device = torch.get_default_device()

        def parameter(value: Tensor) -> nn.Parameter:
            return nn.Parameter(value.to(device))

        with torch.device("cpu"):  # on the meta device a division would import torch.compile, which takes a second
            linear_ramp = torch.arange(width) / max(width - 1, 1) - 0.5
            within_head = (torch.arange(width) % self.head_size) / max(self.head_size - 1, 1) * 2 - 1
            zigzag = within_head * within_head.abs()
            channel = torch.arange(width) / width
            ramp = torch.arange(width) / max(width - 1, 1)

        def mix(power: float) -> nn.Parameter:
            return parameter(1 - channel.pow(power * fade))

        self.x_r, self.x_w, self.x_k = mix(0.2), mix(0.9), mix(0.7)
        self.x_v, self.x_a, self.x_g = mix(0.7), mix(0.9), mix(0.2)

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            gain = 0.1 * (math.sqrt(rank / width) if rank > width else 1.0)
            return drawn(zeros, width, rank), drawn(orthogonal(gain), rank, width, whole=True)

        self.w0 = parameter(-6 + 6 * ramp.pow(1 + depth**0.3) + 0.5 + 2.5 * zigzag)
        self.w1, self.w2 = low_rank(rwkv.decay_rank)
        self.a0 = parameter(-0.19 + 0.3 * zigzag + 0.4 * linear_ramp)
        self.a1, self.a2 = low_rank(rwkv.iclr_rank)
        if "rwkv7" in config.mixers[:layer]:  # there is an earlier RWKV-7 block, whose values are mixed in
            self.v0 = parameter(0.73 - 0.4 * linear_ramp)
            self.v1, self.v2 = low_rank(rwkv.value_rank)
        self.g1, self.g2 = low_rank(rwkv.gate_rank)
        self.k_k = parameter(0.71 - 0.1 * linear_ramp)
        self.k_a = nn.Parameter(torch.full((width,), 1.02))
        self.r_k = nn.Parameter(torch.full((self.heads, self.head_size), -0.04))
        scale = config.init_std_scale
        self.receptance = linear(width, width, 0.5 * scale)
        self.key = linear(width, width, 0.05 * scale)
        self.value = linear(width, width, 0.5 * scale)
        self.output = linear(width, width, 0.0)
        self.ln_x = nn.GroupNorm(self.heads, width, eps=ops.GROUP_NORM_EPS)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / config.layers) ** 0.7)

    def cuts(self) -> Mapping[str, Cut]:
        """Heads. The streams and the first of each two low-rank maps are computed whole in every rank."""
        by_channel = ("w0", "a0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias")
        rows = (f"{name}.weight" for name in ("receptance", "key", "value"))
        columns = ("w2", "a2", "g2", "output.weight")
        of_values = {"v0": Cut(0), "v2": Cut(1)} if hasattr(self, "v0") else {}
        return dict.fromkeys((*by_channel, *rows), Cut(0)) | dict.fromkeys(columns, Cut(1)) | of_values

    def narrow(self, size: int) -> None:
        self.heads //= size
        self.ln_x.num_groups, self.ln_x.num_channels = self.heads, self.heads * self.head_size

    def forward(self, x: Tensor, context: Context, cache: TimeMixCache | None) -> Mixed:
        """x [B, T, D] (normed) -> its output, its cache if wanted, its values [B, T, D]."""
        x = self.copied(x)
        starts, cu_seqlens, v_first = context.starts_BT1, context.cu_seqlens, context.v_first
        mixes = torch.stack([self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g])
        firsts = (self.w1, self.a1, self.g1, *(() if v_first is None else (self.v1,)))
        mixes, w1, a1, g1, *v1 = self.copied_parameters(mixes, *firsts)
        batch, length, _ = x.shape
        x_r, x_w, x_k, x_v, x_a, x_g = ops.time_mix_streams(
            x,
            mixes,
            context.last_before(cache.last_BD if cache else None, x),
            None if starts is None else starts.squeeze(-1),
        )
        r = self.projected("receptance", x_r, context).view(batch, length, self.heads, self.head_size)
        k = self.projected("key", x_k, context)
        value = self.projected("value", x_v, context)
        decay = _product(elementwise(torch.tanh, _product(x_w, w1)), self.w2)
        rate = _product(_product(x_a, a1), self.a2)
        gate = _product(elementwise(torch.sigmoid, _product(x_g, g1)), self.g2)
        v_gate = v0 = None
        if v_first is not None:
            v_gate, v0 = _product(_product(x_v, *v1), self.v2), self.v0
        log_w, k, a, b, v = ops.time_mix_keys(
            k, decay, rate, value, v_first, v_gate, self.w0, self.a0, v0, self.k_k, self.k_a, self.head_size
        )
        if self.allow_neg_eigval:  # c = 2, see the class
            b = 2 * b
        last: Tensor | None
        after: TimeMixCache | tuple[TimeMixCache, ...] | None = None
        if context.token_by_token:
            assert cache is not None
            state, tokens, states = cache.wkv_BHVK, [], []
            for t in range(batch):
                r_t, log_w_t, k_t, v_t, a_t, b_t = (side[t : t + 1, 0] for side in (r, log_w, k, v, a, b))
                token, state = ops.wkv7_step(r_t, log_w_t, k_t, v_t, a_t, b_t, state)
                tokens.append(token)
                states.append(TimeMixCache(x[t : t + 1, 0], state))
            y, last, after = torch.stack(tokens), None, tuple(states)
        elif length == 1 and cache is not None and cu_seqlens is None and not torch.is_grad_enabled():
            r_t, log_w_t, k_t, v_t, a_t, b_t = (t.squeeze(1) for t in (r, log_w, k, v, a, b))
            token, last = ops.wkv7_step(r_t, log_w_t, k_t, v_t, a_t, b_t, cache.wkv_BHVK)
            y = token.unsqueeze(1)
        else:
            carried = cache.wkv_BHVK if cache else None
            if context.sequence is not None:
                carried = _carried((r, log_w, k, v, a, b), cu_seqlens, context.sequence)
            y, last = ops.wkv7(
                r, log_w, k, v, a, b, state=carried, cu_seqlens=cu_seqlens, return_state=context.keep_cache
            )
        mixed = ops.time_mix_output(y, r, k, v, gate, self.r_k, self.ln_x.weight, self.ln_x.bias, self.ln_x.eps)
        if context.keep_cache and last is not None:
            after = TimeMixCache(context.last(x), last)
        return Mixed(self.summed(self.projected("output", mixed, context)), after, values=value)


def _carried(inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, sequence: SequenceSlice) -> Tensor:
    """The states before the documents of a slice, from the slices before it: [N, H, V, K].

    The recurrence with v = 0 that starts from the unit matrix ends with the product of the transitions. `recompute`
    keeps nothing for the backward pass but the inputs, which the recurrence itself keeps too.
    """
    r, log_w, k, v, a, b = inputs
    heads, width = r.shape[2:]
    unit = torch.eye(width, device=r.device, dtype=state_dtype(r)).expand(len(r), heads, width, width)
    scan = partial(ops.wkv7, return_state=True, recompute=True)
    _, final = scan(*inputs, cu_seqlens=cu_seqlens)
    # Of a whole slice: it is used only where no document begins in the slice.
    _, transition = scan(r, log_w, k, torch.zeros_like(v), a, b, state=unit)
    assert final is not None
    assert transition is not None
    return sequence.states_before(final, transition, torch.matmul)


def _product(x: Tensor, weight_IO: Tensor) -> Tensor:
    return ops.linear(x, weight_IO, inputs_first=True)
