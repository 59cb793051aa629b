"""Samples the next token from the logits of a model."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cdrmix.errors import ConfigError
from cdrmix.model.decoding import check_finite

UNITS = 2.0**52  # of a probability, to be added as integers: float64 numbers between 1 and 2 are steps of 2^-52
FIRST = 128  # tokens that are put in order at first; in trained models they have nearly all probability


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and when the text ends.

    Args:
        temperature: divides the logits. 0 takes the most likely token.
        top_p: keeps the most likely tokens up to this total probability. 1 keeps all.
        top_k: keeps the k most likely tokens. 0 keeps all.
        min_p: drops tokens below this share of the probability of the most likely token. 0 drops none.
        repetition_penalty: divides the positive logits of tokens that occur in the prompt or the text so far, and
            multiplies the negative ones (arXiv 1909.05858, section 4.1). The token that begins a document, before the
            prompt, is not one of them: it may be that which ends the text. 1 changes nothing.
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


class Drawing(Protocol):
    """A row for which a token is sampled. ids: its tokens so far. drawn: how many of them were sampled.

    added: how many of them, at the beginning, are neither of the prompt nor sampled. first: if not empty, the first
    sampled token is one of these ids.
    """

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def added(self) -> int: ...
    @property
    def drawn(self) -> int: ...
    @property
    def first(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def random(self) -> torch.Generator: ...


def draw(logits_BV: Tensor, rows: Sequence[Drawing]) -> list[int]:
    """Samples one token id for each row, in float64 on the CPU.

    A row's token depends on its logits, its sampling and its generator only, which gives one number for each token at
    a temperature above 0. The order is: penalty, top-k, temperature, min-p, top-p.
    Raises NonFiniteLogitsError as `check_finite`.
    """
    logits_BV = logits_BV.cpu()
    check_finite(logits_BV)
    if any(row.sampling.repetition_penalty != 1 or (row.first and not row.drawn) for row in rows):
        logits_BV = torch.stack([_adjusted(logits_V, row) for logits_V, row in zip(logits_BV, rows, strict=True)])
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, row in enumerate(rows):
        sampling = row.sampling
        key = (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p)
        alike.setdefault(key if sampling.temperature else (0.0,), []).append(number)
    tokens = [0] * len(rows)
    for numbers in alike.values():
        logits_NV = logits_BV if len(alike) == 1 else logits_BV[numbers]
        chosen = _drawn(logits_NV, rows[numbers[0]].sampling, [rows[number].random for number in numbers])
        for number, token in zip(numbers, chosen, strict=True):
            tokens[number] = token
    return tokens


def _adjusted(logits_V: Tensor, row: Drawing) -> Tensor:
    """The logits after the restriction of the first token and the repetition penalty."""
    logits_V = logits_V.double()
    if row.first and not row.drawn:
        kept = torch.full_like(logits_V, float("-inf"))
        kept[list(row.first)] = logits_V[list(row.first)]
        logits_V = kept
    penalty = row.sampling.repetition_penalty
    if penalty != 1 and row.ids:
        seen = {token for token in row.ids[row.added :] if token < len(logits_V)}
        before = torch.tensor(sorted(seen), dtype=torch.int64)
        found = logits_V[before]
        logits_V = logits_V.index_copy(0, before, torch.where(found > 0, found / penalty, found * penalty))
    return logits_V


def _drawn(logits_NV: Tensor, sampling: Sampling, randoms: Sequence[torch.Generator]) -> list[int]:
    """A token id for each row of logits [N, V], all with the same sampling but for the seed."""
    if sampling.temperature == 0:
        return list(map(int, logits_NV.argmax(-1)))
    if 0 < sampling.top_k < logits_NV.shape[1]:
        kth_N1 = logits_NV.topk(sampling.top_k).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, float("-inf"))
    most_N1 = logits_NV.amax(-1, keepdim=True).double()
    probability_NV = torch.softmax((logits_NV.double() - most_N1) / sampling.temperature, -1)
    if sampling.min_p > 0:
        least_N1 = sampling.min_p * probability_NV.amax(-1, keepdim=True)
        probability_NV = probability_NV.masked_fill(probability_NV < least_N1, 0.0)
        probability_NV = probability_NV / probability_NV.sum(-1, keepdim=True)
    points_N1 = torch.stack([torch.rand(1, generator=random, dtype=torch.float64) for random in randoms])
    if sampling.top_p == 1:
        return list(map(int, inverse(probability_NV, points_N1)[:, 0]))
    most_likely, order = _most_likely(probability_NV, min(FIRST, probability_NV.shape[1]))
    tokens = order.gather(1, inverse(_nucleus(most_likely, sampling.top_p), points_N1))[:, 0]
    # Where these have not the probability top_p together, the row needs the order of all tokens: 70 times the time of
    # FIRST tokens at a vocabulary of 4,096, measured.
    for row in torch.nonzero(most_likely.sum(-1) < sampling.top_p).flatten().tolist():
        probability, every = probability_NV[row : row + 1].sort(descending=True, stable=True)
        place = inverse(_nucleus(probability, sampling.top_p), points_N1[row : row + 1])
        tokens[row] = every.gather(1, place)[0, 0]
    return list(map(int, tokens))


def _most_likely(probability_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their token ids, in falling order, of equal ones the lower id first."""
    ids = probability_NV.topk(count).indices.sort(dim=1).values
    values, order = probability_NV.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _nucleus(probability_NV: Tensor, top_p: float) -> Tensor:
    """Falling probabilities, 0 where the ones before sum to top_p or more. So at least one is kept."""
    cumulative = probability_NV.cumsum(-1)
    return probability_NV.masked_fill(cumulative - probability_NV >= top_p, 0.0)


def inverse(probability_NV: Tensor, points_N1: Tensor) -> Tensor:
    """The inverse of the distribution function: int64 [N, 1], an index for each point in [0, 1).

    Index i is taken if the point, times the sum, is at least the sum before i and below the sum with i: never one of
    probability 0. probability: float64, not negative, in sum from 2^-20 to 2^10; what is below 1 / UNITS counts as 0.
    """
    # Sums of integers: a GPU adds floats in no fixed order, which `be_deterministic` refuses.
    cumulative_NV = (probability_NV * UNITS).long().cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    points_N1 = torch.minimum((points_N1 * total_N1).long(), total_N1 - 1)
    return torch.searchsorted(cumulative_NV, points_N1, right=True).clamp_(max=probability_NV.shape[1] - 1)
