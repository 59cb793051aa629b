"""Perplexity and bits per byte of a model on held-out text, and baselines that need no model.

Bits per byte = (sum of the nats of all predicted tokens) / ln 2 / (bytes of the text of these tokens). So models with
different tokenizers, and compressors, can be compared. All tokens are predicted: the first token of a document from the
token that begins it (end-of-text or begin-of-text), and also the end-of-text token at its end, which has no bytes. Of
conversations, only the tokens are counted that are trained on, with their bytes.
The unigram baseline is the entropy of the distribution of the held-out tokens. No other distribution that ignores the
context is better on this text. gzip and zstd compress the whole held-out text as one stream.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zstandard
from torch import Tensor, nn

from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader
from cdrmix.data.shards import Array, Split
from cdrmix.eval.countdown import Say, counted
from cdrmix.model.causal import evaluation_mode


@dataclass(frozen=True)
class Score:
    """The results of a model on held-out rows. domains: the same by domain, if there are several."""

    loss_nats_per_token: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    text_bytes: int
    domains: Mapping[str, Score] = field(default_factory=dict, kw_only=True)

    @staticmethod
    def of_sums(sums: Tensor, text_bytes: int) -> Score:
        """The results for float64 [2], the sum of the nats and the number of tokens."""
        nats, tokens = sums.tolist()
        loss = nats / tokens
        return Score(
            loss_nats_per_token=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            bits_per_byte=nats / math.log(2) / text_bytes,
            tokens=round(tokens),
            text_bytes=text_bytes,
        )

    def as_json(self) -> dict[str, Any]:
        """The fields by name, without `domains` if there is only one domain."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        of_domains = {name: score.as_json() for name, score in fields.pop("domains").items()}
        return {**fields, "domains": of_domains} if of_domains else fields


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of the same text without a model."""

    unigram_bits_per_byte: float
    gzip9_bits_per_byte: float
    zstd19_bits_per_byte: float


@dataclass(frozen=True)
class HeldOut(Baselines, Score):
    """The results of a model on held-out text, and the baselines."""

    @classmethod
    def of(cls, score: Score, baselines: Baselines) -> HeldOut:
        """Combines the two."""
        return cls(**vars(score), **vars(baselines))


Nats = Callable[[nn.Module, Batch], Tensor]


def loss_model_nats(model: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch from a LossModel, or an engine around one: a scalar."""
    # token_count and share scale only the total loss of the training, not the sum that is used here.
    return model(batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, 1.0, 1.0).next_token_sum


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    text_bytes: int,
    *,
    domain_bytes: Mapping[str, int] | None = None,
    nats: Nats = loss_model_nats,
    together: bool = True,
    copies: int = 1,
) -> Score:
    """Scores held-out batches. Gradients and the training mode of the model do not change.

    model: the argument of `nats`; by default a LossModel or an engine around one.
    batches: the rows of this process. With torch.distributed, each rank has its own rows and the same number of
        batches (sharded weights are gathered together); each rank gets the score of all rows.
    text_bytes: number of UTF-8 bytes of the targets of all ranks.
    domain_bytes: the same by domain (EvalLoader.domain_bytes), to score each of them; the batches have `domains`.
    together: False scores the batches of this process alone. copies: how many ranks have the same rows.
    Returns the loss in nats per token (float64 sums), its exponential, and bits per byte. The nats of the domains sum
    to the nats of all rows. A batch of several domains costs one forward pass for each of them, other batches cost one.
    Raises ValueError if there is nothing to predict.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
    by_domain = {name: torch.zeros_like(sums) for name in domain_bytes or {}}
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            placed = batch.to(device)
            whole = _nats_and_tokens(nats, model, placed)
            sums += whole
            if by_domain:
                for name, part in _parts(nats, model, placed, whole).items():
                    by_domain[name] += part
    if together and dist.is_initialized():
        for each in (sums, *by_domain.values()):
            dist.all_reduce(each)
            each /= copies
    tokens = float(sums[1])
    if tokens == 0 or text_bytes <= 0:
        raise ValueError(f"there is nothing to evaluate: {tokens:.0f} predicted tokens, {text_bytes} bytes of text")
    domains = {
        name: Score.of_sums(by_domain[name], of_bytes) for name, of_bytes in (domain_bytes or {}).items() if of_bytes
    }
    return dataclasses.replace(Score.of_sums(sums, text_bytes), domains=domains)


def _nats_and_tokens(nats: Nats, model: nn.Module, batch: Batch) -> Tensor:
    return torch.stack([nats(model, batch).double(), batch.weights_BT.double().sum()])


def _parts(nats: Nats, model: nn.Module, batch: Batch, whole: Tensor) -> dict[str, Tensor]:
    """`whole`, the nats and tokens of a batch, by domain. The last domain has what the others leave."""
    *others, last = batch.domains
    parts = {}
    for name in others:
        # All rows again, because rows can affect each other (capacity of experts); only this domain has weights.
        weights_BT = batch.weights_BT * batch.domains[name].unsqueeze(1)
        parts[name] = _nats_and_tokens(nats, model, dataclasses.replace(batch, weights_BT=weights_BT))
    return {**parts, last: whole - sum(parts.values())}


def unigram_bits_per_byte(counts: np.ndarray, text_bytes: int) -> float:
    """Bits per byte of tokens under their own distribution. counts: int64 [vocab_size]."""
    occurring = counts[counts > 0].astype(np.float64)
    bits = -(occurring * np.log2(occurring / occurring.sum())).sum()
    return float(bits) / text_bytes


def compressed_bits_per_byte(documents: Iterable[bytes], text_bytes: int) -> tuple[float, float]:
    """Bits per byte of `gzip -9` and `zstd -19` on the concatenated documents. Memory does not grow with the text."""
    gzip = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # 16: with gzip's header and checksum
    zstd = zstandard.ZstdCompressor(level=19).compressobj()
    gzip_bytes = zstd_bytes = 0
    for document in documents:
        gzip_bytes += len(gzip.compress(document))
        zstd_bytes += len(zstd.compress(document))
    gzip_bytes += len(gzip.flush())
    zstd_bytes += len(zstd.flush())
    return 8 * gzip_bytes / text_bytes, 8 * zstd_bytes / text_bytes


def baselines(split: Split, rows: Array | None = None, say: Say = lambda line: None) -> Baselines:
    """Bits per byte of unigram, gzip -9 and zstd -19 on a whole split, or rows of it; of conversations, on what is
    trained on.

    rows: int64 [rows]; None: all. say: receives progress.
    """
    if rows is None and not split.weighted:
        counts, size, texts = split.token_counts(), split.text_bytes, split.text()
    else:
        counts, pieces = np.zeros(split.vocab_size, np.int64), list[bytes]()
        for ids, text in split.trained_text(rows):
            counts += np.bincount(ids, minlength=split.vocab_size)
            pieces.append(text)
        size, texts = sum(map(len, pieces)), iter(pieces)
    gzip9, zstd19 = compressed_bits_per_byte(counted(texts, size, "gzip -9 and zstd -19", say, len), size)
    return Baselines(unigram_bits_per_byte(counts, size), gzip9_bits_per_byte=gzip9, zstd19_bits_per_byte=zstd19)


def held_out(
    loss_model: nn.Module,
    split: Split,
    *,
    row_length: int,
    micro_batch_rows: int,
    max_tokens: int | None = None,
    say: Say = lambda line: None,
) -> HeldOut:
    """The results of a model on a split, in this process alone, and the baselines on the same text.

    loss_model: a LossModule, or a module with its forward pass. It never stores the logits of a whole batch.
    max_tokens: only so many rows, spread evenly, as hold at most so many tokens, but one at least; None: all.
    say: receives progress with the time that is left, and how much is left out.
    """
    loader = bounded(split, row_length, micro_batch_rows, max_tokens, say)
    whole = len(loader.rows) == split.rows
    text_bytes = split.text_bytes if whole and not split.weighted else loader.text_bytes
    batches = counted(loader, len(loader), "held-out text", say)
    score = evaluate(loss_model, batches, text_bytes, domain_bytes=loader.domain_bytes, together=False)
    return HeldOut.of(score, baselines(split, None if whole else loader.rows, say))


def bounded(split: Split, row_length: int, micro_batch_rows: int, max_tokens: int | None, say: Say) -> EvalLoader:
    """The batches of a split, or of as many rows as `max_tokens` allows, as of `held_out`."""
    rows = None if max_tokens is None else max(1, max_tokens // row_length)
    loader = EvalLoader(split, row_length, micro_batch_rows, rows)
    if len(loader.rows) < split.rows:
        say(f"{len(loader.rows):,} of {split.rows:,} held-out rows are read (evaluation.max_tokens)")
    return loader
