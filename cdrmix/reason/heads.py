"""The heads of stage B, which read the language model's hidden states.

ControllerHeads decide whether a chunk's proposal is committed. Summariser makes small vectors of hidden states: s_j =
D mean(h_8j .. h_8j+7) are a chunk's summaries; U s_j stand in front of the next window, like embeddings. An episode's
key is norm(K mean_j s_j), and its query is norm(Q mean_j s_j). OperationHeads choose an operation on memories.

Shapes: B windows, T tokens, D model, S branches or the summaries' width, P summaries of a window, K decisions,
O operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

OPERATIONS = ("noop", "summarize", "retrieve", "splice_window", "cache_write")
NOOP, SUMMARIZE, RETRIEVE, SPLICE, WRITE = range(5)
FACTS = 4  # inputs of the heads in addition to the hidden state: see Row.facts


class WideLinear(nn.Linear):
    """A linear map in float32 at least, in any precision of the language model: decisions can be near their threshold.

    A module of its own, so that ZeRO-3 gathers its weights when it is called.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x float32 or float64 [..., D]."""
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class ControllerHeads(nn.Module):
    """Two linear maps of (hidden state at a chunk's last token - centre) / spread.

    accept: a logit for each branch; a rollback has the logit 0. value: the expected return after a rollback, and after
    committing each branch. Both start as zeros, so all decisions are equally probable. centre, spread: the largest part
    of every hidden state is their mean (in the ablation it has a norm of 11.0 of 11.8, and good and bad chunks differ
    by 1.2). Without the subtraction, updates along the mean would change all decisions in the same way.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, d_model: int, branches: int) -> None:
        super().__init__()
        self.branches = branches
        self.accept = WideLinear(d_model, branches)
        self.value = WideLinear(d_model, 1 + branches)
        for head in (self.accept, self.value):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.register_buffer("centre", torch.zeros(d_model))
        self.register_buffer("spread", torch.ones(d_model))

    @torch.no_grad()
    def calibrate(self, end_XD: Tensor) -> None:
        """Sets centre and spread from a sample of hidden states, [..., D]; only for untrained heads."""
        sample_XD = end_XD.double().flatten(0, -2)
        spread_D = sample_XD.std(0, correction=0)
        self.centre.copy_(sample_XD.mean(0))
        self.spread.copy_(spread_D.clamp(min=max(1e-3 * float(spread_D.max()), 1e-6)))

    def accept_logits(self, end_XD: Tensor) -> Tensor:
        """[..., S]: the logit of each branch against a rollback; float32 at least."""
        return self._read(self.accept, end_XD)

    def values(self, end_XD: Tensor) -> Tensor:
        """[..., 1 + S]: the expected return of a rollback, and of each branch."""
        return self._read(self.value, end_XD)

    def log_probs(self, end_XD: Tensor, temperature: float = 1.0) -> Tensor:
        """[..., 1 + S]: log-probabilities of a rollback and of each branch, from logits / temperature."""
        logits = self.accept_logits(end_XD) / temperature
        return torch.cat([torch.zeros_like(logits[..., :1]), logits], -1).log_softmax(-1)

    def _read(self, head: WideLinear, end_XD: Tensor) -> Tensor:
        wide = torch.promote_types(end_XD.dtype, torch.float32)
        logits: Tensor = head((end_XD.to(wide) - self.centre.to(wide)) / self.spread.to(wide))
        return logits


class Summariser(nn.Module):
    """Makes summaries of width `dim` from every `stride` tokens; and prefixes, keys and queries from summaries."""

    def __init__(self, d_model: int, dim: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.down = nn.Linear(d_model, dim, bias=False)
        self.up = nn.Linear(dim, d_model, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.query = nn.Linear(dim, dim, bias=False)
        for linear in (self.down, self.up, self.key, self.query):
            bound = math.sqrt(3 / linear.in_features)  # variance 1 / inputs keeps lengths
            nn.init.uniform_(linear.weight, -bound, bound)

    def count(self, tokens: int) -> int:
        """The number P of summaries of a window with so many tokens."""
        return -(-tokens // self.stride)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states to summaries [B, P, S]; the last summary is of the remaining tokens."""
        batch, length, _ = hidden_BTD.shape
        count = self.count(length)
        padded = functional.pad(hidden_BTD, (0, 0, 0, count * self.stride - length))
        sums_BPD = padded.view(batch, count, self.stride, -1).sum(2)
        tokens_P = torch.full((count,), float(self.stride), device=hidden_BTD.device)
        tokens_P[-1] = length - (count - 1) * self.stride
        return self.down(sums_BPD / tokens_P[:, None].to(sums_BPD))

    def prefix(self, summaries_BPS: Tensor) -> Tensor:
        """Vectors [B, P, D] to put in front of the next window."""
        return self.up(summaries_BPS)

    def keys(self, summaries_BPS: Tensor) -> Tensor:
        """The key of a stored episode, [B, S] of length 1, float32."""
        return functional.normalize(self.key(summaries_BPS.mean(1)).float(), dim=-1)

    def queries(self, summaries_BPS: Tensor) -> Tensor:
        """The query of a search, [B, S] of length 1, float32."""
        return functional.normalize(self.query(summaries_BPS.mean(1)).float(), dim=-1)


class OperationHeads(nn.Module):
    """The policy over OPERATIONS, and the value: the expected reward."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.policy = nn.Linear(d_model + FACTS, len(OPERATIONS))
        self.value = nn.Linear(d_model + FACTS, 1)
        for linear in (self.policy, self.value):  # all operations are equally probable at first
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def log_probs(self, features_KD: Tensor, allowed_KO: Tensor, temperature: float = 1.0) -> Tensor:
        """log softmax(logits / temperature) of every operation, [K, O] float32; -inf where it is not allowed."""
        logits_KO = self.policy(features_KD).float() / temperature
        return logits_KO.masked_fill(~allowed_KO, -torch.inf).log_softmax(-1)
