"""Samples the next token from the logits of a model."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and when the text ends.

    Args:
        temperature: divides the logits. 0 takes the most likely token.
        top_p: keeps the most likely tokens up to this total probability. 1 keeps all.
        top_k: keeps the k most likely tokens. 0 keeps all.
        min_p: drops tokens below this share of the probability of the most likely token. 0 drops none.
        repetition_penalty: divides the positive logits of tokens that occur in the prompt or the text so far, and
            multiplies the negative ones (arXiv 1909.05858, section 4.1). 1 changes nothing.
        seed: the same seed gives the same text.
        max_new_tokens: the text ends after this number of tokens.
        stop: the text ends before this string, or before the first of several strings.

    Raises:
        ConfigError: a value is out of range. It is a ValueError.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 1
    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_new_tokens"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} must be a number; found {value!r}")
        stop = self.stop if isinstance(self.stop, Sequence) else (None,)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop must be one or several strings that are not empty; found {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        for name, value, allowed, text in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "finite and at least 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "at least 0 and at most 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < float("inf"),
                "finite and above 0",
            ),
            ("seed", self.seed, 0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens > 0, "at least 1"),
        ):
            if not allowed:
                raise ConfigError(f"{name} must be {text}; found {value}")


def _integer(name: str, value: object) -> int:
    """An integer of Python or NumPy as a Python int."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # a value without __index__ raises TypeError
    except TypeError:
        raise ConfigError(f"{name} must be an integer; found {value!r}") from None


def draw(logits_V: Tensor, sampling: Sampling, random: torch.Generator, seen: Sequence[int] = ()) -> int:
    """Samples one token id from logits [vocab_size], in float64 on the CPU.

    seen: token ids so far, for the repetition penalty. The order is: penalty, top-k, temperature, min-p, top-p.
    """
    logits_V = logits_V.double().cpu()
    if sampling.repetition_penalty != 1 and seen:
        before = torch.tensor(sorted(set(seen)))
        found, penalty = logits_V[before], sampling.repetition_penalty
        logits_V = logits_V.index_copy(0, before, torch.where(found > 0, found / penalty, found * penalty))
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if 0 < sampling.top_k < logits_V.numel():
        kth = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, float("-inf"))
    probability, token = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=0).sort(
        descending=True, stable=True
    )
    if sampling.min_p > 0:
        probability = probability.masked_fill(probability < sampling.min_p * probability[0], 0.0)
        probability = probability / probability.sum()
    cumulative = probability.cumsum(0)
    # A token is kept if the more likely tokens sum to less than top_p. So at least one token is kept.
    probability = probability.masked_fill(cumulative - probability >= sampling.top_p, 0.0)
    cumulative = probability.cumsum(0)
    point = torch.rand((), generator=random, dtype=torch.float64) * cumulative[-1]
    position = int(torch.searchsorted(cumulative, point, right=True))
    return int(token[min(position, int((probability > 0).sum()) - 1)])
