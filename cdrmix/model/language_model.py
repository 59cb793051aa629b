"""The language model: embedding, the scheduled stack of blocks, the final norm, the head, and its recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.config.names import plugin_layers
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.model.bigrams import BigramEmbedding, tokens_before, with_last_token
from cdrmix.model.block import Block, BlockCache
from cdrmix.model.context import Tokens, make_context
from cdrmix.model.depth import DepthStats, Gated
from cdrmix.model.fast_weights import FastWeightOptions, FastWeightSpan, make_adapters
from cdrmix.model.feed_forward.moe import MoeFeedForward
from cdrmix.model.feed_forward.router import Routed, Router
from cdrmix.model.initial_values import fill, seed_of_values, without_values
from cdrmix.model.layers import AddNorm, TokenEmbedding
from cdrmix.model.mixers.attention import AttentionCache, FixedAttentionCache, RaggedAttentionCache
from cdrmix.model.pipeline import Border, Stage, carries_values, leave
from cdrmix.model.prediction import MultiTokenPrediction
from cdrmix.model.sequence import SequenceGroup
from cdrmix.model.tensor_parallel import TensorGroup, divide

Cache = tuple[BlockCache, ...]  # of a model, by layer
Part = TypeVar("Part", bound=nn.Module)


class RouterStats(NamedTuple):
    """The routers' reports, stacked in the model's order (a block may have one in its mixer and one in its
    feed-forward): rows computed and routes before capacity by expert [L, E] (int64), losses [L]."""

    counts_LE: Tensor
    tokens_per_expert_LE: Tensor
    load_balance_L: Tensor
    z_loss_L: Tensor

    def loss(self, weights: FeedForward) -> Tensor:
        """The weighted losses, means over the routers: what is added to the loss of a micro-batch."""
        balance = weights.load_balance_weight * self.load_balance_L.mean()
        return balance + weights.z_loss_weight * self.z_loss_L.mean()


class Output(NamedTuple):
    """The result of a forward pass: hidden states after the final norm [B, T, D], router reports, the cache if wanted,
    the mean of the plastic adapters' own objective (a scalar; None without adapters); the reports of the branches that
    skip tokens (None without `model.depth`); the caches after each token if wanted.

    border: for the next stage of a pipeline. Then hidden_BTD is its residual stream, and the reports of routers that
    are in other stages are zero."""

    hidden_BTD: Tensor
    router: RouterStats | None
    cache: Cache | None
    correlation: Tensor | None
    depth: DepthStats | None = None
    caches: tuple[Cache, ...] | None = None
    border: Border | None = None


class LanguageModel(nn.Module):
    """Token ids to hidden states; `logits` applies the head.

    The parameters depend on one number from torch's global generator: seed it first. They are the same for every
    division of the model among processes. A model with layers of plugins draws all from the global generator, in order.
    Under `torch.device("meta")` no memory is allocated.
    experts: makes each block's mixture of experts; by default one with all experts in this process.
    reasoning: adds plastic adapters to mixers, if it enables them. They do not change the other parameters.
    tensor: the ranks that divide the parameters; None: this process has them whole.
    partition: called with each parameter of a block or table as soon as it has values, as the only one of a module, and
        then with the block or table. It may keep this process's partition of the parameters, so that the whole model is
        never in one process. None: the model is whole.
    stage: keeps the parts that a stage of a pipeline has; the others take no memory.
    narrow_residual: under autocast the residual stream between blocks has its dtype instead of the embedding's float32.
    Sums and norms are still computed in float32, and rounded once.
    """

    def __init__(
        self,
        config: Model,
        *,
        activation_checkpointing: bool = False,
        experts: Callable[[Model], MoeFeedForward] = MoeFeedForward,
        reasoning: Reasoning | None = None,
        narrow_residual: bool = False,
        tensor: TensorGroup | None = None,
        partition: Callable[[nn.Module], None] | None = None,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, Model):
            raise ValueError(
                f"config must be the model section of a Config, config.model; found {type(config).__name__}"
            )
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.narrow_residual = narrow_residual
        self.stage = Stage(0, 1) if stage is None else stage
        self.layers = self.stage.layers(config.layers)

        seed = seed_of_values()
        # A plugin may change parameters after it has made them, so they need their values at once.
        at_once = bool(plugin_layers(config.mixers, config.feed_forward.kind))

        def made(name: str, make: Callable[[], Part]) -> Part:
            with nullcontext() if at_once else without_values():
                part = make()
            if tensor is not None:
                divide(part, tensor)
            if self.stage.has(name, config):
                fill(part, name, seed, partition)
            else:
                leave(part)
            if partition is not None:
                partition(part)
            return part

        def table(name: str) -> TokenEmbedding:
            return made(name, lambda: TokenEmbedding(config.vocab_size, config.d_model, std))

        def norm(name: str) -> AddNorm:
            return made(name, lambda: AddNorm(config, wide=True))

        std = 0.02 * config.init_std_scale
        self.embedding = table("embedding")
        self.embedding_norm = norm("embedding_norm") if config.embedding_norm else None
        blocks = [
            made(f"blocks.{layer}", partial(Block, config, layer, mixer, experts))
            for layer, mixer in enumerate(config.mixers)
        ]
        self.blocks = nn.ModuleList(blocks)
        if config.tie_embeddings and self.stage.last and not self.stage.first:
            self.embedding.weight.copy_of_table = True  # type: ignore[attr-defined]  # see is_copy
        # A mixer that skips tokens has positions of its own.
        self.attends = any(block.mixer.attends and "mixer" not in block.depth_routers for block in blocks)
        self.final_norm = norm("final_norm")  # in float32: the heads of stage B need it
        self.head = None if config.tie_embeddings else table("head")
        for name, module in self.named_modules():
            if isinstance(module, Router):
                module.name = name
        if reasoning is not None and reasoning.plastic_lora.enabled:
            for layer, (kind, block) in enumerate(zip(config.mixers, blocks, strict=True)):
                adapted = partial(make_adapters, kind, block.mixer, reasoning.plastic_lora, reasoning.chunk)
                block.plastic = made(f"blocks.{layer}.plastic", adapted) or None
        self.adapters = sum(len(block.plastic) for block in blocks if block.plastic is not None)
        self.prediction: MultiTokenPrediction | None = None
        if config.prediction is not None:
            depths = partial(MultiTokenPrediction, config, activation_checkpointing=activation_checkpointing)
            self.prediction = made("prediction", depths)
        self.bigrams: BigramEmbedding | None = None
        if config.bigrams is not None:
            self.bigrams = made("bigrams", partial(BigramEmbedding, config.bigrams, config.d_model, std))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def batching(self) -> Literal["any", "length", "row"]:
        """Which rows are generated together. Plastic adapters count chunks from the start of a row."""
        return "length" if self.adapters else "any"

    @property
    def head_weight(self) -> Tensor:
        """The output head, [V, D]; the embedding itself if they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        token_by_token: bool = False,
        prefix_BPD: Tensor | None = None,
        fast_weights: FastWeightOptions | None = None,
        sequence: SequenceGroup | None = None,
        received: Border | None = None,
        tokens_N: Tensor | None = None,
    ) -> Output:
        """ids int64 [B, T] in [0, vocab_size); cu_seqlens int [D + 1] over the flattened tokens: the model forgets at
        each start.

        cache: continues an earlier call's rows (one document a row, so not together with cu_seqlens).
        return_cache: with cu_seqlens the cache has a row for each document. ValueError for an empty document, and for a
            model with plastic adapters, which count chunks from the start of a row.
        token_by_token: with `cache` and one row, `Output.caches` has the cache after each token. All parts but those
            that mix tokens see the tokens as rows of one token. So where the bits of a row do not depend on other rows
            (`kernels/common/products.py`) each token has the bits of a pass of its own. ValueError for other arguments,
            with gradients, and for a model with plastic adapters.
        prefix_BPD: vectors in front of each row's tokens, read like embeddings; nothing is given or written for them.
        fast_weights: options for a model with plastic adapters; None: the defaults.
        sequence: this process computes its slice of the rows, and the others of the group theirs: hidden states [B, L,
            D]. All of them call it with the same ids. For training of packed or whole rows, without a cache, a prefix
            or adapters.
        received: of the stage before, for the same ids; None in the first. For training, as `sequence`.
        tokens_N: int64, the places of the tokens among the flattened positions that this process computes. The others
            are filling: documents of their own, which no router sees. None: every position is a token. For rows
            without a cache or a prefix.
        """
        if cache is not None and cu_seqlens is not None:
            raise ValueError("pass either cu_seqlens (packed documents) or cache (one continued document a row)")
        if return_cache and cu_seqlens is not None:
            if self.adapters:
                raise ValueError("return_cache with cu_seqlens: a model with plastic adapters takes one document a row")
            if (cu_seqlens.diff() < 1).any():
                raise ValueError("return_cache with cu_seqlens: every document must have at least one token")
        options = FastWeightOptions() if fast_weights is None else fast_weights
        if not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2 or ids_BT.dtype not in (torch.int64, torch.int32):
            found = f"{ids_BT.dtype} {list(ids_BT.shape)}" if isinstance(ids_BT, Tensor) else type(ids_BT).__name__
            raise ValueError(f"ids must be an int64 or int32 tensor [B, T]; found {found}")
        batch, length = ids_BT.shape
        past = _past(cache, ids_BT.device)
        in_rows_BT = ids_BT
        if token_by_token:
            self._check_token_by_token(batch, cache)
            past = past + torch.arange(length, device=ids_BT.device)
            ids_BT, batch, length = ids_BT.mT, length, 1
        if not ids_BT.numel():
            raise ValueError(f"ids are {batch} rows of {length} tokens: give at least one token, in every process")
        prefix = 0 if prefix_BPD is None else prefix_BPD.shape[1]
        if prefix and (cu_seqlens is not None or options.cu_seqlens is not None):
            raise ValueError("prefix_BPD is for one document a row: pass no cu_seqlens with it")
        context = make_context(
            self.config,
            batch,
            prefix + length,
            cu_seqlens,
            past,
            ids_BT.device,
            attends=self.attends,
            prefix=prefix,
            keep_cache=return_cache or token_by_token,
            dtype=torch.promote_types(self.embedding.weight.dtype, torch.float32),
        )
        context = context._replace(token_by_token=token_by_token)
        starts_BT = None if context.starts_BT1 is None else context.starts_BT1.squeeze(-1)
        before_BT = None
        if self.bigrams is not None:
            before_BT = tokens_before(in_rows_BT, cache[0].last_token_B if cache else None, starts_BT)
            before_BT = before_BT.mT if token_by_token else before_BT
        if sequence is not None:
            assert not context.keep_cache, "a slice of the rows has no cache"
            assert not prefix + self.adapters, "conflicts/parallel.py refuses these"
            context, ids_BT = context.of_slice(sequence, batch, length, ids_BT.device), sequence.slice(ids_BT)
            before_BT = None if before_BT is None else sequence.slice(before_BT)
        if tokens_N is not None:
            assert not context.keep_cache, "a cache would have the filling"
            assert not prefix, "the places are those of ids alone"
            context = context._replace(tokens=Tokens.of(tokens_N, ids_BT.numel()))
        if received is not None:
            x, context = received.x, context._replace(v_first=received.v_first)
        else:
            x = self._embedded(ids_BT, before_BT)
        if options.cu_seqlens is not None:
            starts_BT = ops.document_starts(options.cu_seqlens, batch, length)
        span = FastWeightSpan(starts_BT, prefix, options.scale_S)
        if prefix_BPD is not None:
            x = torch.cat([prefix_BPD.to(x), x], 1)
        y: Tensor | None = None  # a branch's output, which the next norm adds to the stream x
        caches: list[Any] = []
        reports: list[Routed] = []
        correlations: list[Tensor] = []
        gated: list[Gated] = []
        for layer in self.layers:
            block = self.blocks[layer]
            arguments = (x, y, context, span, cache[layer] if cache else None)
            if self.activation_checkpointing and torch.is_grad_enabled():
                result = checkpoint(block, *arguments, use_reentrant=False)
            else:
                result = block(*arguments)
            x, y, v_first, after, routed, correlation, skipping = result
            context = context._replace(v_first=v_first)
            if after is not None:
                caches.append(after)
            if correlation is not None:
                correlations.append(correlation)
            reports += routed
            gated += skipping
        if self.bigrams is not None and caches:
            caches[0] = with_last_token(caches[0], in_rows_BT, cu_seqlens)
        router = RouterStats(*(torch.stack(column) for column in zip(*reports, strict=True))) if reports else None
        if self.stage.size > 1:
            router = self._among_all(router, ids_BT.device)
        depth = DepthStats(*(torch.stack(column) for column in zip(*gated, strict=True))) if gated else None
        objective = torch.stack(correlations).sum() / self.adapters if correlations else None
        if prefix:
            x, y = x[:, prefix:], None if y is None else y[:, prefix:]
        if not self.stage.last:
            assert y is not None, "a stage has at least one block"
            x = x + y
            values = context.v_first if carries_values(self.config.mixers, self.layers.stop) else None
            return Output(x, router, None, None, border=Border(x, values))
        _, hidden_BTD = self.final_norm(x, y)
        if token_by_token:
            return Output(hidden_BTD.transpose(0, 1), router, None, objective, depth, tuple(zip(*caches, strict=True)))
        return Output(hidden_BTD, router, tuple(caches) if return_cache else None, objective, depth)

    def _embedded(self, ids_BT: Tensor, before_BT: Tensor | None) -> Tensor:
        """The first residual stream [B, T, D]. before_BT: `bigrams.tokens_before`; None without bigrams."""
        x: Tensor = self.embedding(ids_BT)
        if self.bigrams is not None:
            x = x + self.bigrams(ids_BT, before_BT)
        if self.embedding_norm is not None:
            _, x = self.embedding_norm(x)
        return x.to(ops.compute_dtype(x)) if self.narrow_residual else x

    def _among_all(self, router: RouterStats | None, device: torch.device) -> RouterStats | None:
        """A stage's reports with zeros for the routers of other stages; None for a model without routers."""
        layers = [int(name.split(".")[0]) for name in self.config.routers]
        if not layers:
            return None
        loads = torch.zeros(len(layers), self.config.feed_forward.experts, dtype=torch.int64, device=device)
        losses = torch.zeros(len(layers), device=device)
        zeros = RouterStats(loads, loads, losses, losses)
        if router is None:
            return zeros
        mine = torch.tensor([i for i, layer in enumerate(layers) if layer in self.layers], device=device)
        return RouterStats(*(none.to(own).index_copy(0, mine, own) for none, own in zip(zeros, router, strict=True)))

    def _check_token_by_token(self, rows: int, cache: Cache | None) -> None:
        ragged = any(isinstance(block.mixer, RaggedAttentionCache) for block in cache or ())
        if rows != 1 or cache is None or ragged or self.adapters or torch.is_grad_enabled():
            raise ValueError(
                "token_by_token needs one row, its cache, a model without plastic adapters, and no gradients"
            )

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V] in float32 at least."""
        logits = ops.linear(hidden_BTD, self.head_weight)
        return logits if logits.dtype == torch.float64 else logits.float()


def _past(cache: Cache | None, device: torch.device) -> int | Tensor:
    """How many tokens the cache has seen, by its first attention block, int64 [B] where rows differ; 0 without one."""
    for block in cache or ():
        if isinstance(block.mixer, AttentionCache):
            return block.mixer.keys.shape[2]
        if isinstance(block.mixer, RaggedAttentionCache):
            return torch.tensor([row.keys.shape[2] for row in block.mixer.rows], device=device)
        if isinstance(block.mixer, FixedAttentionCache):
            return block.mixer.next_1 - block.mixer.first_B
    return 0
