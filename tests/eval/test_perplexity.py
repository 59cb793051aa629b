"""Tests of the held-out figures against numbers worked out another way."""

from __future__ import annotations

import gzip
import math
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor, nn

from cdrmix.data.batch import Batch
from cdrmix.eval.perplexity import (
    Baselines,
    HeldOut,
    compressed_bits_per_byte,
    evaluate,
    unigram_bits_per_byte,
)


def batch(rows: int, *, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    weights = (torch.rand(rows, 8, generator=random) > 0.3).float()
    targets = torch.randint(0, 5, (rows, 8), generator=random)
    starts = torch.tensor([0, rows * 8], dtype=torch.int32)
    return Batch(targets.roll(1, 1), targets, weights, starts, step=0, token_count=float(weights.sum()))


class Bigram(nn.Module):
    """Logits that depend on the last token; `forward` answers as a LossModel does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))
        self.modes: list[bool] = []

    def forward(
        self, ids: Tensor, targets: Tensor, weights: Tensor, cu_seqlens: Tensor, count: float, share: float
    ) -> SimpleNamespace:
        self.modes.append(self.training)
        assert not torch.is_grad_enabled()
        nats = -torch.log_softmax(self.table[ids], -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return SimpleNamespace(next_token_sum=(nats * weights).sum())


def test_loss_perplexity_and_bits_per_byte_agree_with_a_plain_sum() -> None:
    model = Bigram()
    batches = [batch(3, seed=1), batch(2, seed=2)]
    score = evaluate(model, batches, 200)
    nats, tokens = 0.0, 0
    for each in batches:
        for token, target, weight in zip(
            each.ids_BT.flatten().tolist(), each.targets_BT.flatten().tolist(), each.weights_BT.flatten(), strict=True
        ):
            if weight:
                nats -= torch.log_softmax(model.table[token].double(), 0)[target].item()
                tokens += 1
    # Each batch's sum is float32: 24 terms of a few nats, so 24 roundings at most.
    assert score.loss_nats_per_token == pytest.approx(nats / tokens, rel=24 * torch.finfo(torch.float32).eps)
    assert score.tokens == tokens
    assert score.perplexity == math.exp(score.loss_nats_per_token)
    assert score.bits_per_byte == pytest.approx(score.loss_nats_per_token * tokens / math.log(2) / 200, rel=1e-12)
    assert model.modes == [False, False]
    assert model.training


def test_every_module_keeps_its_mode() -> None:
    """A fresh wrapper is in training mode, the model it is put around may not be: routers drop and jitter in it."""
    model = Bigram()
    model.inner = nn.Dropout().eval()
    evaluate(model, [batch(1, seed=1)], 40)
    assert (model.training, model.inner.training) == (True, False)


def test_a_model_of_others_is_scored_by_its_logits() -> None:
    def logits_nats(logits_BTV: Tensor, batch: Batch) -> Tensor:
        nats = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="none")
        return (nats * batch.weights_BT.flatten()).sum()

    model = Bigram()
    batches = [batch(3, seed=1), batch(2, seed=2)]
    score = evaluate(model, batches, 200, nats=lambda peer, each: logits_nats(model.table[each.ids_BT], each))
    assert score.loss_nats_per_token == pytest.approx(evaluate(model, batches, 200).loss_nats_per_token, rel=1e-5)


def test_nothing_to_predict_is_an_error() -> None:
    empty = batch(1, seed=0)
    empty.weights_BT.zero_()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(Bigram(), [empty], 10)


def test_the_unigram_figure_is_the_entropy_of_the_targets() -> None:
    counts = np.array([4, 0, 2, 2], np.int64)  # 1.5 bits a token, 8 tokens
    assert unigram_bits_per_byte(counts, 24) == pytest.approx(1.5 * 8 / 24, rel=1e-14)
    assert unigram_bits_per_byte(np.array([7, 0]), 24) == 0


def test_gzip_and_zstd_see_one_stream_without_separators() -> None:
    documents = [bytes(f"def f{number}(x):\n    return x + {number}\n", "utf-8") * 3 for number in range(50)]
    whole = b"".join(documents)
    gzip9, zstd19 = compressed_bits_per_byte(iter(documents), len(whole))
    assert gzip9 == 8 * len(gzip.compress(whole, 9, mtime=0)) / len(whole)
    # Streamed, zstd does not know the length beforehand: the frame header may differ by a few bytes.
    assert zstd19 == pytest.approx(
        8 * len(zstandard.ZstdCompressor(level=19).compress(whole)) / len(whole), abs=80 / 1e3
    )


def test_held_out_puts_score_and_baselines_side_by_side() -> None:
    score = evaluate(Bigram(), [batch(2, seed=2)], 50)
    both = HeldOut.of(score, Baselines(3.0, 2.0, 1.9))
    assert (both.bits_per_byte, both.gzip9_bits_per_byte) == (score.bits_per_byte, 2.0)


RANKS = """
import sys, torch, torch.distributed as dist
from cdrmix.data.batch import Batch
from cdrmix.eval.perplexity import evaluate
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
def batch(number):
    weights = torch.ones(2, 3) if number < 3 else torch.zeros(2, 3)
    ids = torch.full((2, 3), number)
    # Batch 0 is of domain a, batch 1 of b, batch 2 of both, batch 3 of neither: as an EvalLoader fills them up.
    rows = {0: {"a": [1, 1]}, 1: {"b": [1, 1]}, 2: {"a": [1, 0], "b": [0, 1]}, 3: {"a": [0, 0], "b": [0, 0]}}[number]
    domains = {name: torch.tensor(of_domain).bool() for name, of_domain in rows.items()}
    return Batch(ids, torch.zeros(2, 3).long(), weights, torch.tensor([0, 6]), 0, 6.0, domains)
model = torch.nn.Linear(1, 1)
nats = lambda model, each: (each.ids_BT * each.weights_BT).sum()
mine = [batch(number) for number in (rank, rank + 2)]
score = evaluate(model, mine, 10, domain_bytes={"a": 4, "b": 6}, nats=nats)
alone = evaluate(model, mine, 10, nats=nats, together=False)
domains = [f"{name}:{of.tokens}:{of.loss_nats_per_token:.4f}" for name, of in score.domains.items()]
print(score.tokens, score.loss_nats_per_token, alone.tokens, *domains)
dist.destroy_process_group()
"""


def test_ranks_score_their_rows_together(tmp_path: object) -> None:
    ranks = [forked.start(["-c", RANKS, str(rank), f"{tmp_path}/store"]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    outputs = [rank.output.split() for rank in ranks]
    # 18 targets in all, their nats 0, 1 and 2; rank 0 holds 12 of them, rank 1 six and a batch without targets. Domain
    # a has six of 0 and three of 2, domain b six of 1 and three of 2.
    domains = ["a:9:0.6667", "b:9:1.3333"]
    assert outputs == [["18", "1.0", "12", *domains], ["18", "1.0", "6", *domains]]
