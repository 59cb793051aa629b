"""Working memory: every few tokens' hidden states as one small vector, to be read again as a prefix, or searched by.

s_j = D mean(h_8j .. h_8j+7) are a chunk's summaries. U s_j stand in front of the next window, like embeddings. An
episode's key is norm(K mean_j s_j), what it is searched by norm(Q mean_j s_j). Episodic memories, which hold chunks
under such keys, are in kept_episodes.py (of a process) and episodic_index.py (on the disk).

Shapes: B windows, T tokens, D model, P summaries of a window, S their width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix.model.layers import uniform_


class Summariser(nn.Module):
    """Summaries of width `dim` of every `stride` tokens; prefix, keys and queries made of them."""

    def __init__(self, d_model: int, dim: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.down = nn.Linear(d_model, dim, bias=False)
        self.up = nn.Linear(dim, d_model, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.query = nn.Linear(dim, dim, bias=False)
        for linear in (self.down, self.up, self.key, self.query):
            uniform_(linear.weight, math.sqrt(3))  # of variance 1 / fan-in: lengths stay as they are

    def count(self, tokens: int) -> int:
        """P of a window of so many tokens."""
        return -(-tokens // self.stride)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states to summaries [B, P, S]; the last one is of the tokens that are left."""
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
        """Under what an episode is kept, [B, S] of length 1, float32."""
        return functional.normalize(self.key(summaries_BPS.mean(1)).float(), dim=-1)

    def queries(self, summaries_BPS: Tensor) -> Tensor:
        """What is searched for, [B, S] of length 1, float32."""
        return functional.normalize(self.query(summaries_BPS.mean(1)).float(), dim=-1)
