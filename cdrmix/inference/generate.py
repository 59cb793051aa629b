"""Text from a model, token by token: each costs one forward pass of one token on the cache of what came before.

That cache has a constant size in the RWKV-7 and Mamba-2 blocks; the attention blocks keep their keys and values.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the likeliest; top_p 1 and top_k 0 cut nothing off."""

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 1
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value, allowed, text in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "at least 0"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top-k", self.top_k, self.top_k >= 0, "at least 0"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens > 0, "at least 1"),
        ):
            if not allowed:
                raise ConfigError(f"--{name} must be {text}; found {value}")


def generate(model: LanguageModel, tokenizer: TextTokenizer, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yields the continuation of `prompt` piece by piece, ending at the end-of-text token or at the limit.

    The prompt begins a document, after an end-of-text, as in training; it may be empty. Pieces are whole
    characters: bytes of a character that spans tokens are held back until it is complete; bytes that are
    not UTF-8 become U+FFFD. The same model, prompt and sampling give the same text.
    Raises ConfigError for a prompt that is not Unicode text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python hands on bytes that are not UTF-8
        raise ConfigError("--prompt must be UTF-8 text")
    # Words carry the space before them: after a lone space token the model has seen next to nothing. So a last
    # space is left to the first token drawn, which must begin with it.
    space = prompt.endswith(" ") and bool(prompt.strip())
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt[:-1] if space else prompt)]
    every = range(tokenizer.vocab_size if space else 0)
    first = [token for token in every if tokenizer.decode_bytes([token])[:1] == b" "]
    for number, token in enumerate(generate_ids(model, ids, sampling, first)):
        if token == tokenizer.end_of_text_id:
            break
        spelled = tokenizer.decode_bytes([token])
        piece = decoder.decode(spelled[1:] if space and number == 0 else spelled)
        if piece:
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


@torch.no_grad()
def generate_ids(model: LanguageModel, ids: list[int], sampling: Sampling, first: Sequence[int] = ()) -> Iterator[int]:
    """Yields up to max_new_tokens token ids that follow `ids` (not empty); the first is one of `first`, if any."""
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(sampling.seed)
    step_B1, cache = torch.tensor([ids], device=device), None
    for _ in range(sampling.max_new_tokens):
        output = model(step_B1, cache=cache, return_cache=True)
        cache = output.cache
        logits_V = model.logits(output.hidden_BTD[:, -1]).flatten()
        if first:
            kept = torch.full_like(logits_V, float("-inf"))
            kept[list(first)] = logits_V[list(first)]
            logits_V, first = kept, ()
        token = draw(logits_V, sampling, random)
        yield token
        step_B1 = torch.tensor([[token]], device=device)


def draw(logits_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One token id from logits [vocab_size]: top-k, then temperature, then top-p, then a draw in float64 on the CPU."""
    logits_V = logits_V.double().cpu()
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if 0 < sampling.top_k < logits_V.numel():
        kth = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, float("-inf"))
    probability, token = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=0).sort(
        descending=True, stable=True
    )
    cumulative = probability.cumsum(0)
    # Kept: every token that the more likely ones do not already cover; so always at least one.
    probability = probability.masked_fill(cumulative - probability >= sampling.top_p, 0.0)
    cumulative = probability.cumsum(0)
    point = torch.rand((), generator=random, dtype=torch.float64) * cumulative[-1]
    position = int(torch.searchsorted(cumulative, point, right=True))
    return int(token[min(position, int((probability > 0).sum()) - 1)])
