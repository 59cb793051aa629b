"""Multi-token prediction: the modules of the depths after the next token, their targets, and their loss in one pass.

Depth 1 is the next token, depth i + 1 the token i places after it. Shapes: B rows, T tokens, D model, V vocabulary,
R = B T tokens, K = tokens - 1 further depths, P the tokens at which these are trained.

Sources: parallel heads (Gloeckle et al. 2024, arXiv 2404.19737); maps before a shared head (Medusa, arXiv 2401.10774);
heads that read the tokens between (Hydra, arXiv 2402.05109); blocks that read them (DeepSeek-V3, arXiv 2412.19437,
section 2.2); several targets of one head (modded-nanogpt).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_prediction import Prediction
from cdrmix.model.block import Block, BlockCache
from cdrmix.model.context import Context, make_context
from cdrmix.model.fast_weights import FastWeightSpan
from cdrmix.model.layers import AddNorm, TokenEmbedding, linear

Embed = Callable[[Tensor], Tensor]  # token ids to vectors: the embedding of the model


def depth_weights(section: Prediction, step: int, steps: int) -> tuple[float, ...]:
    """The weights of the K further depths at `step` of `steps`, counted from 0: a function of the step alone."""
    depths = range(2, section.tokens + 1)
    part = min(step * section.tokens // steps, section.tokens - 1)  # of `tokens` equal parts of the training
    most = {"none": section.tokens, "forward": part + 1, "reverse": section.tokens - part}[section.curriculum]
    return tuple(w if depth <= most else 0.0 for depth, w in zip(depths, section.depth_weights, strict=True))


class Depth(nn.Module):
    """One further depth of the kinds maps, chain and heads: what its output head reads, token by token."""

    def __init__(self, config: Model, kind: str) -> None:
        super().__init__()
        width, scale = config.d_model, config.init_std_scale
        self.reads_tokens = kind == "chain"
        if kind == "heads":
            self.head = TokenEmbedding(config.vocab_size, width, std=0.02 * scale)
            return
        if self.reads_tokens:
            self.state_norm, self.token_norm = AddNorm(config), AddNorm(config)
            self.up = linear(2 * width, 2 * width, scale)
            self.down = linear(2 * width, width, 0.0)
        else:
            self.down = linear(width, width, 0.0)
        self.norm = AddNorm(config)

    def forward(self, state: Tensor, token: Tensor | None) -> tuple[Tensor, Tensor]:
        """state [..., D] of the depth before, and the vector of the token before the predicted one, [..., D] -> the
        state of this depth, and the input of the output head.

            heads: h;  maps: norm(h + silu(W h));  chain: s' = s + W_down silu(W_up [norm s; norm token]), norm(s')
        """
        if not hasattr(self, "norm"):
            return state, state
        if self.reads_tokens:
            assert token is not None
            both = torch.cat([self.state_norm(state)[1], self.token_norm(token)[1]], -1)
            change = self.down(functional.silu(self.up(both)))
            return self.norm(state, change)
        return state, self.norm(state, functional.silu(self.down(state)))[1]


class DepthBlock(nn.Module):
    """One further depth of kind sequential: h' = block(W [norm h; norm token]) (arXiv 2412.19437, equations 21 to 24).

    The block has the mixer of the section and a dense feed-forward of the width of a token's experts. Its state goes to
    the next depth, and through a norm to the output head of the model.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.prediction is not None
        mixer, ffn = config.prediction.mixer, config.feed_forward
        hidden = ffn.hidden * (ffn.top_k if ffn.kind == "moe" else 1)
        wide = {"hidden": hidden, "dense_layers": [], "dense_hidden": None, "shared_hidden": None}
        dense = ffn.model_copy(update={"kind": "dense", **wide})
        alone = {
            "layers": 1,
            "mixer_layers": {mixer: [0]},
            "attention_fraction": 0.0,
            "feed_forward": dense,
            "depth": None,
        }
        self.state_norm, self.token_norm = AddNorm(config), AddNorm(config)
        self.joined = linear(2 * config.d_model, config.d_model, config.init_std_scale)
        self.block = Block(config.model_copy(update=alone), 0, mixer)
        self.norm = AddNorm(config)

    def forward(
        self, state_BTD: Tensor, token_BTD: Tensor, context: Context, cache: BlockCache | None
    ) -> tuple[Tensor, Tensor, BlockCache | None]:
        """The state and the head's input as of Depth, and the block's cache after the last token, if wanted."""
        joined = self.joined(torch.cat([self.state_norm(state_BTD)[1], self.token_norm(token_BTD)[1]], -1))
        made = self.block(joined, None, context, FastWeightSpan(context.starts_BT1, 0, None), cache)
        return *self.norm(made.x, made.y), made.cache


class MultiTokenPrediction(nn.Module):
    """The further depths of a model. `LossModel` calls it in training, and the drafts of speculative decoding do."""

    def __init__(self, config: Model, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        assert config.prediction is not None
        self.section, self._config = config.prediction, config
        self.activation_checkpointing = activation_checkpointing
        kind, further = self.section.kind, self.section.tokens - 1
        depths: list[nn.Module] = []
        if kind == "sequential":
            depths = [DepthBlock(config) for _ in range(further)]
        elif kind != "shared":
            depths = [Depth(config, kind) for _ in range(further)]
        self.depths = nn.ModuleList(depths)

    @property
    def reads_tokens(self) -> bool:
        """Whether a depth reads the vector of the token before the one that it predicts."""
        return self.section.kind in ("chain", "sequential")

    @property
    def drafts(self) -> bool:
        """Whether the depths can draft tokens: each has a distribution of its own."""
        return self.section.kind != "shared"

    def heads(self) -> list[Tensor] | None:
        """The output heads [V, D] of kind heads, one a depth; None where the depths share the head of the model."""
        if self.section.kind != "heads":
            return None
        return [depth.head.weight for depth in self.depths if isinstance(depth, Depth)]

    def forward(
        self, hidden_BTD: Tensor, ids_BT: Tensor, cu_seqlens: Tensor | None, embed: Embed, first: int
    ) -> Tensor:
        """The inputs of the output heads [K, P, D], at the flattened tokens first, first + every, ...

        hidden: the model's hidden states, after its final norm. A token that is not in the document of the token it is
        read for has the vector 0.
        """
        every, further = self.section.every, self.section.tokens - 1
        if self.section.kind == "sequential":
            states_KBTD = self._blocks(hidden_BTD, ids_BT, cu_seqlens, embed)
            return states_KBTD.flatten(1, 2)[:, first::every]
        tokens_KPD: Any = [None] * further
        if self.reads_tokens:
            places_KBT = torch.stack([following(ids_BT, shift) for shift in range(1, further + 1)])
            tokens_KPD = embed(places_KBT.flatten(1)[:, first::every])
        state_PD, heads_PD = hidden_BTD.flatten(0, 1)[first::every], []
        for depth, token_PD in zip(self.depths, tokens_KPD, strict=True):
            state_PD, head_PD = depth(state_PD, token_PD)
            heads_PD.append(head_PD)
        return torch.stack(heads_PD)

    def _blocks(self, hidden_BTD: Tensor, ids_BT: Tensor, cu_seqlens: Tensor | None, embed: Embed) -> Tensor:
        shifts = range(1, self.section.tokens)
        inside_KBT = torch.stack([same_document(ids_BT, cu_seqlens, shift) for shift in shifts])
        tokens_KBTD = embed(torch.stack([following(ids_BT, shift) for shift in shifts])) * inside_KBT.unsqueeze(-1)
        context = self.context(ids_BT, cu_seqlens, hidden_BTD, 0, keep_cache=False)
        state, heads = hidden_BTD, []
        for depth, token_BTD in zip(self.depths, tokens_KBTD, strict=True):
            arguments = (state, token_BTD, context, None)
            if self.activation_checkpointing and torch.is_grad_enabled():
                state, head, _ = checkpoint(depth, *arguments, use_reentrant=False)
            else:
                state, head, _ = depth(*arguments)
            heads.append(head)
        return torch.stack(heads)

    def context(
        self, ids_BT: Tensor, cu_seqlens: Tensor | None, hidden: Tensor, past: int, *, keep_cache: bool
    ) -> Context:
        """The context of the blocks of kind sequential for tokens after `past` others."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        batch, length = ids_BT.shape
        return make_context(
            self._config,
            batch,
            length,
            cu_seqlens,
            past,
            ids_BT.device,
            attends=self.section.mixer == "attention",
            keep_cache=keep_cache,
            dtype=dtype,
        )


def following(x_BT: Tensor, shift: int) -> Tensor:
    """x of the token `shift` places later in the row, [B, T]; 0 beyond its end."""
    return functional.pad(x_BT[:, shift:], (0, min(shift, x_BT.shape[1])))


def same_document(x_BT: Tensor, cu_seqlens: Tensor | None, shift: int) -> Tensor:
    """Whether the token `shift` places later is in the row and in the document of a token: bool [B, T]."""
    length = x_BT.shape[1]
    inside = torch.arange(length, device=x_BT.device) < length - shift
    if cu_seqlens is None:
        return inside.expand(x_BT.shape)
    document_BT = ops.document_starts(cu_seqlens, *x_BT.shape).long().cumsum(1)
    return inside & (following(document_BT, shift) == document_BT)


class Depths(NamedTuple):
    """The K further depths at a step. weights: those of `depth_weights`. first: the first token that is trained."""

    weights: tuple[float, ...]
    first: int

    @classmethod
    def of(cls, section: Prediction, step: int, steps: int) -> Depths:
        """Those of `step` of `steps`, counted from 0."""
        return cls(depth_weights(section, step, steps), -step % section.every)


class PredictionSums(NamedTuple):
    """loss: sum of weight * cross-entropy over all depths, a scalar, with a gradient. next_token: that of depth 1, a
    scalar, or [S] for sets of weights. nats_2K: the sums of weight * cross-entropy of the K further depths without
    their own weights, and the sums of these weights; 0 for a depth without a weight.

    The parts have no gradient: the fused loss computes gradients once for sets whose losses are just summed.
    """

    loss: Tensor
    next_token: Tensor
    nats_2K: Tensor


def prediction_sums(
    prediction: MultiTokenPrediction,
    head: Callable[[], Tensor],
    embed: Embed,
    hidden_BTD: Tensor,
    ids_BT: Tensor,
    targets_BT: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor | None,
    depths: Depths,
) -> PredictionSums:
    """The losses of all depths in one pass of the fused loss; with `detach`, and with kind heads, in one for each head.

    head: reads the output head, [V, D]. It is read after every call of a module, because ZeRO-3 partitions a weight
    again after the call of its module.
    targets: int64 [B, T], the next token of each. weights: [B, T], or S sets of them [S, B, T]; the depths have the sum
    of the sets. The target of depth i + 1 at token t is the target of t + i, where both are in one document.
    If no depth has a weight at this step, the loss is that of depth 1 alone to the bit, and gradients are zeros.
    """
    section, further = prediction.section, len(depths.weights)
    factors = [weight * section.every for weight in depths.weights]  # Python numbers: nothing is copied to a GPU
    picked = slice(depths.first, None, section.every)
    main_SR = weights.reshape(1 if weights.ndim == 2 else len(weights), -1)
    targets_KR, weights_KR = _targets(ids_BT, targets_BT, main_SR.sum(0).view_as(ids_BT), cu_seqlens, further)
    scaled_KP = torch.stack([each * factor for each, factor in zip(weights_KR[:, picked], factors, strict=True)])
    targets_KP = targets_KR[:, picked]

    states_KPD = None
    if section.kind != "shared":
        source_BTD = hidden_BTD.detach() if section.detach else hidden_BTD
        vectors = (lambda ids: embed(ids).detach()) if section.detach else embed
        states_KPD = prediction(source_BTD, ids_BT, cu_seqlens, vectors, depths.first)
    own, head_weight = prediction.heads(), head()
    hidden_RD = hidden_BTD.flatten(0, 1)
    apart = not any(factors) or own is not None or section.detach
    if apart:
        flat = weights.flatten(-2)
        next_token = ops.linear_cross_entropy(
            hidden_RD, head_weight, targets_BT.flatten().expand(flat.shape), weights=flat
        )
        if not any(factors):
            loss = next_token.sum() if states_KPD is None else next_token.sum() + _no_gradient(states_KPD, own)
            return PredictionSums(loss, next_token.detach(), scaled_KP.new_zeros(2, further))
        assert states_KPD is not None
        if own is None:
            sums_K = ops.linear_cross_entropy(states_KPD, head_weight.detach(), targets_KP, weights=scaled_KP)
        else:
            each = zip(states_KPD, own, targets_KP, scaled_KP, strict=True)
            sums_K = torch.stack([ops.linear_cross_entropy(h, w, t, weights=x) for h, w, t, x in each])
        loss = next_token.sum() + sums_K.sum()
    else:
        if states_KPD is None:
            spread_KR = torch.zeros_like(weights_KR)
            spread_KR[:, picked] = scaled_KP
            rows_RD, targets = hidden_RD, torch.cat([targets_BT.view(1, -1).expand(main_SR.shape), targets_KR])
            both_weights = torch.cat([main_SR, spread_KR])
        else:
            rows_RD, targets, both_weights = _one_above_another(
                hidden_RD, states_KPD, targets_BT.flatten(), targets_KP, main_SR, scaled_KP
            )
        sums = ops.linear_cross_entropy(rows_RD, head_weight, targets, weights=both_weights)
        loss, (next_token, sums_K) = sums.sum(), sums.split([len(main_SR), further])
        next_token = next_token if weights.ndim == 3 else next_token[0]
    nats = [total / factor if factor else total * 0 for total, factor in zip(sums_K.detach(), factors, strict=True)]
    counts = [each[picked].sum() * bool(factor) for each, factor in zip(weights_KR, factors, strict=True)]
    return PredictionSums(loss, next_token.detach(), torch.stack([torch.stack(nats), torch.stack(counts).to(nats[0])]))


def _targets(
    ids_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor, cu_seqlens: Tensor | None, further: int
) -> tuple[Tensor, Tensor]:
    """The targets of the K further depths [K, R], and their weights, 0 where a target is in another document."""
    shifts = range(1, further + 1)
    weights = [following(weights_BT, shift) * same_document(ids_BT, cu_seqlens, shift) for shift in shifts]
    targets = [following(targets_BT, shift) for shift in shifts]
    return torch.stack(targets).flatten(1), torch.stack(weights).flatten(1)


def _one_above_another(
    hidden_RD: Tensor, states_KPD: Tensor, targets_R: Tensor, targets_KP: Tensor, main_SR: Tensor, scaled_KP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of all depths, and S + K sets of targets and weights for them.

    A set has no weight on the rows of the other depths, and rows without a weight in any set cost nothing.
    """
    rows, sets, (further, places) = len(hidden_RD), len(main_SR), targets_KP.shape
    rows_ND = torch.cat([hidden_RD, states_KPD.flatten(0, 1).to(hidden_RD.dtype)])
    targets = torch.cat([targets_R, targets_KP.flatten()]).expand(sets + further, -1)
    weights = main_SR.new_zeros(sets + further, len(rows_ND))
    weights[:sets, :rows] = main_SR
    for depth in range(further):
        start = rows + depth * places
        weights[sets + depth, start : start + places] = scaled_KP[depth]
    return rows_ND, targets, weights


def _no_gradient(states_KPD: Tensor, own: list[Tensor] | None) -> Tensor:
    """0 with gradients of zero, so that an optimizer treats the parameters as in every other step."""
    zero = (states_KPD * 0).sum()
    return zero if own is None else zero + torch.stack([(head[:1] * 0).sum() for head in own]).sum()
