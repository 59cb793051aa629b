"""The language model: embedding, the scheduled stack of blocks, the final norm, the head, and its recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cdrmix.config.schema import Model
from cdrmix.model.attention import AttentionState
from cdrmix.model.blocks import Block, BlockState
from cdrmix.model.experts import MoeFeedForward
from cdrmix.model.layers import TokenEmbedding, make_norm
from cdrmix.model.places import place_tokens
from cdrmix.model.router import Routed, Router

ModelState = tuple[BlockState, ...]


class RouterStats(NamedTuple):
    """The routers' reports, one after another as in the model (a block may have one in its mixer and one in its
    feed-forward): rows computed and routes wanting by expert [L, E] (int64), losses [L]."""

    counts_LE: Tensor
    demand_LE: Tensor
    load_balance_L: Tensor
    z_loss_L: Tensor


class Output(NamedTuple):
    """What a forward pass gives: hidden states after the final norm [B, T, D], router reports, recurrent state."""

    hidden_BTD: Tensor
    router: RouterStats | None
    state: ModelState | None


class LanguageModel(nn.Module):
    """Token ids to hidden states; `logits` reads them through the head.

    Parameters are drawn from torch's global generator: seed it first. Under `torch.device("meta")` none is
    allocated.
    experts: makes each block's mixture of experts; by default a whole one, of which nothing is in other processes.
    """

    def __init__(
        self,
        config: Model,
        *,
        activation_checkpointing: bool = False,
        experts: Callable[[Model], MoeFeedForward] = MoeFeedForward,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model, std=0.02 * config.init_std_scale)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        blocks = [Block(config, layer, mixer, experts) for layer, mixer in enumerate(config.mixers)]
        self.blocks = nn.ModuleList(blocks)
        self.attends = any(block.mixer.attends for block in blocks)
        self.final_norm = make_norm(config)
        self.head = (
            None
            if config.tie_embeddings
            else TokenEmbedding(config.vocab_size, config.d_model, std=0.02 * config.init_std_scale)
        )
        for name, module in self.named_modules():
            if isinstance(module, Router):
                module.name = name

    @property
    def head_weight(self) -> Tensor:
        """The output head, [V, D]: the embedding itself where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Output:
        """ids int64 [B, T]; cu_seqlens int [D + 1] over the flattened tokens: the model forgets at each start.

        `state` continues an earlier call's rows (one document a row, so not together with cu_seqlens).
        """
        if state is not None and cu_seqlens is not None:
            raise ValueError("pass either cu_seqlens (packed documents) or state (one continued document a row)")
        if return_state and cu_seqlens is not None:
            raise ValueError(
                "return_state is for one document a row; of packed documents (cu_seqlens) none is continued"
            )
        batch, length = ids_BT.shape
        if not ids_BT.numel():
            raise ValueError(f"ids are {batch} rows of {length} tokens: give at least one token, in every process")
        places = place_tokens(self.config, batch, length, cu_seqlens, _past(state), ids_BT.device, attends=self.attends)
        x = self.embedding_norm(self.embedding(ids_BT))
        v_first: Tensor | None = None
        states: list[BlockState] = []
        reports: list[Routed] = []
        for layer, block in enumerate(self.blocks):
            carried = state[layer] if state else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                arguments = (x, v_first, places, carried, return_state)
                x, v_first, after, routed = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, v_first, after, routed = block(x, v_first, places, carried, return_state)
            if after is not None:
                states.append(after)
            reports += routed
        router = RouterStats(*(torch.stack(column) for column in zip(*reports, strict=True))) if reports else None
        return Output(self.final_norm(x), router, tuple(states) if return_state else None)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V] in float32 at least."""
        logits = functional.linear(hidden_BTD, self.head_weight)
        return logits if logits.dtype == torch.float64 else logits.float()


def _past(state: ModelState | None) -> int:
    """How many tokens the state has seen, by its first attention block; 0 where there is none."""
    for block in state or ():
        if isinstance(block.mixer, AttentionState):
            return block.mixer.keys.shape[2]
    return 0
