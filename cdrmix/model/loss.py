"""The training loss in one forward pass: the next-token loss, that of further depths, and the routers' losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.model.depth import DepthStats
from cdrmix.model.language_model import LanguageModel, RouterStats
from cdrmix.model.pipeline import Border
from cdrmix.model.prediction import Depths, PredictionSums, prediction_sums
from cdrmix.model.sequence import SequenceGroup
from cdrmix.model.tensor_parallel import cross_entropy

# The starts of documents over the flattened positions, int [D + 1], and the places of the tokens among the positions of
# the targets, int64 [N]; the others are filling (None: there is none). Starts alone; None: each row is one document.
Documents = tuple[Tensor | None, Tensor | None] | Tensor | None


class Losses(NamedTuple):
    """The terms of one micro-batch. Summing `total` over a global batch's micro-batches gives the global loss.

    next_token_sum: sum of weight * cross-entropy, nats. load_balance, z_loss: means over layers, unweighted.
    prediction_2K: of multi-token prediction, `PredictionSums.nats_2K`.
    """

    total: Tensor
    next_token_sum: Tensor
    load_balance: Tensor
    z_loss: Tensor
    router: RouterStats | None
    depth: DepthStats | None = None
    prediction_2K: Tensor | None = None


class LossModule(nn.Module, ABC):
    """The module that the engine trains: its output is the loss. `language_model` is the model in it.

    The next-token loss weights every token by its weight. The routers' losses and counts include all tokens, also those
    of weight 0, which are routed and computed like the others, but not the filling of rows, which is no token. A
    subclass says how its model computes each term.
    """

    language_model: nn.Module
    base: str | None = None  # SHA-256 of the frozen model if only adapters in it are trained and saved

    @property
    def ends(self) -> bool:
        """Whether the next-token loss is computed here, and not in a later stage of a pipeline."""
        return True

    def prepare(self) -> list[str]:
        """Finds what the forward pass must know about the weights. Returns lines for the user.

        Every process calls it once before the first step; the engine may have sharded the weights by then.
        """
        return []

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        documents: Documents,
        token_count: float,
        share: float = 1.0,
        prediction: Depths | None = None,
        together: bool = False,
    ) -> Losses:
        """documents: `Batch.documents`. token_count: sum of the weights over the global batch; share: 1 / the number of
        its micro-batches.

        weights_BT may also be [S, B, T]: S sets of weights for the same tokens. Then next_token_sum is [S], and total
        too; together: total is of the sum of the sets, a scalar.
        With sequence parallelism ids_BT has whole rows, and targets and weights are of this process's slice of them.
        prediction: adds the losses of the further depths of multi-token prediction, divided by the same count; total is
            then a scalar, and next_token_sum has no gradient. None: the next token alone, as in every evaluation.
        """
        cu_seqlens, tokens_N = documents if isinstance(documents, tuple) else (documents, None)
        hidden, router, depth = self._hidden(ids_BT, cu_seqlens, tokens_N)
        prediction_2K = None
        if not self.ends:
            next_token = torch.zeros(weights_BT.shape[:-2], dtype=weights_BT.dtype, device=hidden.device)
            total = next_token.sum() if together else next_token
        elif prediction is None:
            next_token = self._next_token_sum(
                hidden.reshape(-1, hidden.shape[-1]), targets_BT.reshape(-1), weights_BT.flatten(-2)
            )
            total = (next_token.sum() if together else next_token) / token_count
        else:
            loss, next_token, prediction_2K = self._prediction_sums(
                hidden, ids_BT, targets_BT, weights_BT, cu_seqlens, prediction
            )
            total = loss / token_count
        load_balance = z_loss = torch.zeros((), device=total.device)
        if router is not None:
            load_balance, z_loss = router.load_balance_L.mean(), router.z_loss_L.mean()
            total = total + self._router_loss(router, share)
        return Losses(total, next_token, load_balance, z_loss, router, depth, prediction_2K)

    @abstractmethod
    def _hidden(
        self, ids_BT: Tensor, cu_seqlens: Tensor | None, tokens_N: Tensor | None
    ) -> tuple[Tensor, RouterStats | None, DepthStats | None]:
        """The hidden states [B, T, D], and the reports of the routers and of those of the depth; None without."""

    @abstractmethod
    def _next_token_sum(self, hidden_RD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
        """Sum of weight * cross-entropy, nats, float32 scalar; [S] for S sets of weights [S, R]."""

    def _prediction_sums(
        self,
        hidden_BTD: Tensor,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        cu_seqlens: Tensor | None,
        depths: Depths,
    ) -> PredictionSums:
        """The losses of all depths. Raises ValueError for a model that predicts the next token alone."""
        raise ValueError("depths were given to a model without multi-token prediction (model.prediction)")

    @abstractmethod
    def _router_loss(self, router: RouterStats, share: float) -> Tensor:
        """The weighted losses of the routers, times `share`."""


class LossModel(LossModule):
    """A language model of this package with its loss. sequence: the processes that share each row's tokens, if any.

    In a stage of a pipeline `received`, of the stage before, is set before each call, which sets `sent`.
    """

    language_model: LanguageModel

    def __init__(self, language_model: LanguageModel, sequence: SequenceGroup | None = None) -> None:
        super().__init__()
        self.language_model, self.sequence = language_model, sequence
        self.received: Border | None = None
        self.sent: Border | None = None

    @property
    def ends(self) -> bool:
        """Whether this is the last stage of a pipeline, or all of them."""
        return self.language_model.stage.last

    def _hidden(
        self, ids_BT: Tensor, cu_seqlens: Tensor | None, tokens_N: Tensor | None
    ) -> tuple[Tensor, RouterStats | None, DepthStats | None]:
        output = self.language_model(
            ids_BT, cu_seqlens=cu_seqlens, sequence=self.sequence, received=self.received, tokens_N=tokens_N
        )
        self.sent = output.border
        return output.hidden_BTD, output.router, output.depth

    def _next_token_sum(self, hidden_RD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
        targets = targets_R.expand(weights_R.shape)
        tensor = self.language_model.embedding.tensor
        if tensor is not None:
            return cross_entropy(hidden_RD, self.language_model.head_weight, targets, weights_R, tensor)
        return ops.linear_cross_entropy(hidden_RD, self.language_model.head_weight, targets, weights=weights_R)

    def _prediction_sums(
        self,
        hidden_BTD: Tensor,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        cu_seqlens: Tensor | None,
        depths: Depths,
    ) -> PredictionSums:
        model = self.language_model
        arguments = hidden_BTD, ids_BT, targets_BT, weights_BT, cu_seqlens, depths
        if model.prediction is None:
            return super()._prediction_sums(*arguments)
        return prediction_sums(model.prediction, lambda: model.head_weight, model.embedding, *arguments)

    def _router_loss(self, router: RouterStats, share: float) -> Tensor:
        return share * router.loss(self.language_model.config.feed_forward)
