"""The training loss in one forward pass: the next-token loss and the routers' losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.model.language_model import LanguageModel, RouterStats


class Losses(NamedTuple):
    """The terms of one micro-batch. Summing `total` over a global batch's micro-batches gives the global loss.

    next_token_sum: sum of weight * cross-entropy, nats. load_balance, z_loss: means over layers, unweighted.
    """

    total: Tensor
    next_token_sum: Tensor
    load_balance: Tensor
    z_loss: Tensor
    router: RouterStats | None


class LossModule(nn.Module):
    """The module that the engine trains: its output is the loss. `language_model` is the model in it.

    Its forward pass takes ids, targets, weights [B, T], cu_seqlens, the token count and the share of the micro-batch,
    as LossModel.forward, and returns Losses. Weights [S, B, T] are S sets for the same tokens; then next_token_sum and
    total are [S].
    """

    language_model: nn.Module
    base: str | None = None  # SHA-256 of the frozen model if only adapters in it are trained and saved

    def prepare(self) -> list[str]:
        """What must be known before the first step and needs the weights, which the engine may have sharded by then.

        Every process calls it. Returns lines for the user.
        """
        return []


class LossModel(LossModule):
    """A language model whose output is its loss: the module that the engine trains.

    The next-token loss weights every token by its weight. The routers' losses and counts include all tokens, also those
    of weight 0, which are routed and computed like the others.
    """

    language_model: LanguageModel

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        cu_seqlens: Tensor | None,
        token_count: float,
        share: float = 1.0,
    ) -> Losses:
        """token_count: sum of the weights over the global batch; share: 1 / the number of its micro-batches.

        weights_BT may also be [S, B, T]: S sets of weights for the same tokens. Then next_token_sum and total are [S].
        """
        config = self.language_model.config.feed_forward
        hidden, router, *_ = self.language_model(ids_BT, cu_seqlens=cu_seqlens)
        weights = weights_BT.flatten(-2)
        next_token = ops.linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.language_model.head_weight,
            targets_BT.reshape(-1).expand(weights.shape),
            weights=weights,
        )
        total = next_token / token_count
        load_balance = z_loss = torch.zeros((), device=total.device)
        if router is not None:
            load_balance, z_loss = router.load_balance_L.mean(), router.z_loss_L.mean()
            routing = config.load_balance_weight * load_balance + config.z_loss_weight * z_loss
            total = total + share * routing
        return Losses(total, next_token, load_balance, z_loss, router)
