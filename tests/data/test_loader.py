"""Order as a function: permutations that are bijections, batches that do not depend on the number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader, Prefetcher, TrainLoader
from cdrmix.data.permutation import permute, permute_each
from cdrmix.data.shard_files import write_index
from cdrmix.data.shard_writer import SplitWriter
from cdrmix.data.shards import (
    FORMAT,
    SPLITS,
    ShardSet,
    Split,
    open_shards,
    token_dtype,
)
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import write_checksummed
from cdrmix.errors import ConfigError, ShardError

ROW = 16


END = "<|endoftext|>"


def write_shards(
    folder: Path,
    texts: list[str],
    *,
    row_length: int = ROW,
    weights: dict[int, float] | None = None,
    domains: tuple[str, ...] = ("text",),
) -> ShardSet:
    """Shards of texts, every fourth held out. weights: of the tokens whose id is a key of it. domains: text i is of
    domain i modulo their number."""
    tokenizer = TextTokenizer.train(texts, vocab_size=320, end_of_text=END)
    folder.mkdir()
    splits, files = {}, {"tokenizer.json": write_checksummed(folder / "tokenizer.json", tokenizer.json_bytes)}
    for name in SPLITS:
        writer = SplitWriter(
            folder,
            name,
            vocab_size=320,
            shard_tokens=500,
            row_length=row_length,
            domains=domains,
            weights=weights is not None,
        )
        with writer:
            for number, text in enumerate(texts):
                if (number % 4 == 0) != (name == "valid"):
                    continue
                ids = np.append(tokenizer.encode_batch([text])[0], np.uint32(tokenizer.end_of_text_id))
                of_ids = None if weights is None else np.array([weights.get(id_, 1.0) for id_ in ids], np.float32)
                writer.add(ids, len(text.encode()), domain=number % len(domains), weights=of_ids)
            splits[name] = writer.close()
        files |= writer.files
    index = {
        "format": FORMAT,
        "key": "k",
        "vocab_size": 320,
        "dtype": token_dtype(320),
        "shard_tokens": 500,
        "row_length": row_length,
        "end_of_text": END,
        "end_of_text_id": tokenizer.end_of_text_id,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "splits": splits,
        "files": files,
        "report": {},
    }
    write_index(folder, index)
    return open_shards(folder)


@pytest.fixture
def shards(tmp_path: Path, texts: list[str]) -> ShardSet:
    return write_shards(tmp_path / "shards", texts)


def train_loader(split: Split, *, batch_rows: int = 4, micro: int = 2, **options: int) -> TrainLoader:
    return TrainLoader(split, row_length=ROW, batch_rows=batch_rows, micro_batch_rows=micro, seed=7, **options)


@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 2**40))
def test_permute_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    places = np.arange(size)
    permuted = permute(places, size, (seed, epoch))
    assert permuted.dtype == np.int64
    np.testing.assert_array_equal(np.sort(permuted), places)
    # and a function of each place by itself
    some = places[:: max(1, size // 7)][::-1]
    np.testing.assert_array_equal(permute(some, size, (seed, epoch)), permuted[some])


@given(st.integers(2, 2**62), st.data())
def test_permute_stays_inside_a_large_domain(size: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=5, unique=True)))
    permuted = permute(places, size, (1, 2))
    assert (permuted >= 0).all()
    assert (permuted < size).all()
    assert len(set(permuted.tolist())) == len(places)


def test_many_permutations_at_once_are_each_by_itself() -> None:
    sizes, keys = [1, 7, 1000, 2**40], [(1,), (2, 3), (1, 2), (4, 5)]
    which = np.arange(400) % 4
    places = np.arange(400) % np.array(sizes)[which]
    together = permute_each(places, which, sizes, keys)
    for number, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        mine = which == number
        np.testing.assert_array_equal(together[mine], permute(places[mine], size, key))


def test_the_order_is_that_of_earlier_versions() -> None:
    """A run that is continued by another version must go on in its order: values of the first one."""
    expected = [4, 7, 10, 2, 9, 1, 8, 5, 3, 0, 6, 11]
    assert permute(np.arange(12), 12, (1, 0)).tolist() == expected


@pytest.mark.parametrize("position", [-1, 10, 10**9])
def test_a_position_outside_raises(position: int) -> None:
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        permute(np.array([0, position]), 10, (1, 1))


@pytest.mark.parametrize("size", [3, 10, 100])
def test_keys_send_a_place_everywhere_alike(size: int) -> None:
    keys = 1000
    counts = np.bincount([permute(np.array([1]), size, (seed, 0))[0] for seed in range(keys)], minlength=size)
    # each count is binomial; five standard deviations are passed once in 10^6
    assert np.abs(counts - keys / size).max() < 5 * math.sqrt(keys / size)


def test_an_epoch_gives_every_row_once_and_epochs_differ(shards: ShardSet) -> None:
    loader = train_loader(shards.train, batch_rows=6, micro=2)
    rows = shards.train.rows
    assert rows % 6, "the last batch of an epoch must reach into the next one for this test to mean anything"
    sequence = np.concatenate([loader.rows(step) for step in range(rows)])[: 3 * rows].reshape(3, rows)
    for epoch in sequence:
        assert sorted(epoch.tolist()) == list(range(rows))
    assert len({tuple(epoch) for epoch in sequence.tolist()}) == 3
    assert loader.epoch(0) == 0
    assert loader.epoch(rows) == 6


def test_a_batch_larger_than_the_split(shards: ShardSet) -> None:
    rows = shards.valid.rows
    loader = train_loader(shards.valid, batch_rows=3 * rows, micro=rows)
    assert np.bincount(loader.rows(5)).tolist() == [3] * rows


def equal(one: Batch, other: Batch) -> bool:
    names = ("ids_BT", "targets_BT", "weights_BT", "cu_seqlens_N")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names) and (
        (one.step, one.token_count) == (other.step, other.token_count)
    )


def test_batches_are_a_pure_function_of_the_step(shards: ShardSet) -> None:
    loader = train_loader(shards.train)
    forward = [loader.micro_batches(step) for step in range(5)]
    fresh = train_loader(shards.train)
    for step in (4, 0, 3, 3):
        assert all(map(equal, forward[step], fresh.micro_batches(step)))
    other_seed = TrainLoader(shards.train, row_length=ROW, batch_rows=4, micro_batch_rows=2, seed=8)
    assert not equal(forward[0][0], other_seed.micro_batches(0)[0])


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(shards: ShardSet, world: int) -> None:
    alone = train_loader(shards.train, batch_rows=12, micro=2)
    ranks = [train_loader(shards.train, batch_rows=12, micro=2, rank=rank, world_size=world) for rank in range(world)]
    for step in (0, 1, 100):
        batches = [loader.micro_batches(step) for loader in ranks]
        assert {len(of_rank) for of_rank in batches} == {6 // world}
        in_order = [of_rank[number] for number in range(6 // world) for of_rank in batches]
        assert all(map(equal, in_order, alone.micro_batches(step)))
        assert sum(float(batch.weights_BT.sum()) for batch in in_order) == in_order[0].token_count


def is_token(batch: Batch) -> torch.Tensor:
    """bool, the shape of the targets: where a batch says that there is a token."""
    if batch.tokens_N is None:
        return torch.ones_like(batch.targets_BT, dtype=torch.bool)
    mask = torch.zeros_like(batch.targets_BT, dtype=torch.bool)
    mask.view(-1)[batch.tokens_N] = True
    assert not mask.all(), "without filling there is no list of tokens"
    assert mask.sum() == len(batch.tokens_N)
    return mask


def documents_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of the stretches between boundaries that have targets."""
    ids, targets, weights = (x.flatten() for x in (batch.ids_BT, batch.targets_BT, batch.weights_BT))
    found = []
    for start, stop in zip(batch.cu_seqlens_N[:-1].tolist(), batch.cu_seqlens_N[1:].tolist(), strict=True):
        assert len(set(weights[start:stop].tolist())) == 1
        if weights[start]:
            found.append((ids[start:stop].tolist(), targets[start:stop].tolist()))
    return found


def test_batches_hold_the_documents(shards: ShardSet) -> None:
    """Pieces of documents, each position's target the token after it; together every token."""
    split = shards.train
    end = split.end_of_text_id
    targets_seen = np.zeros(split.vocab_size, np.int64)
    pieces = set()
    for batch in EvalLoader(split, ROW, 5):
        height = batch.ids_BT.shape[0]
        assert batch.ids_BT.dtype == batch.targets_BT.dtype == torch.int64
        assert (batch.weights_BT.dtype, batch.cu_seqlens_N.dtype) == (torch.float32, torch.int32)
        boundaries = batch.cu_seqlens_N.tolist()
        assert boundaries[0] == 0
        assert boundaries[-1] == height * ROW
        assert boundaries == sorted(set(boundaries))
        assert set(range(0, height * ROW, ROW)) <= set(boundaries)
        filling = batch.weights_BT == 0
        assert (batch.ids_BT[filling] == end).all()
        assert (batch.targets_BT[filling] == 0).all()
        assert torch.equal(is_token(batch), ~filling)
        assert batch.token_count == float(batch.weights_BT.sum())
        for inputs, targets in documents_of(batch):
            assert inputs[1:] == targets[:-1]
            pieces.add((*inputs, targets[-1]))
            targets_seen += np.bincount(targets, minlength=split.vocab_size)
    np.testing.assert_array_equal(targets_seen, split.token_counts())
    assert targets_seen.sum() == split.tokens - 1
    tokenizer = shards.tokenizer
    for text in split.text():
        ids = [end, *tokenizer.encode(text.decode()), end]
        for start in range(0, len(ids) - 1, ROW):
            assert tuple(ids[start : start + ROW + 1]) in pieces


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("max_rows", [None, 1, 7, 10**6])
def test_evaluation_reads_every_row_once(shards: ShardSet, world: int, max_rows: int | None) -> None:
    split = shards.train
    loaders = [EvalLoader(split, ROW, 3, max_rows, rank, world) for rank in range(world)]
    batches = [list(loader) for loader in loaders]
    assert {len(of_rank) for of_rank in batches} == {len(loaders[0])}, "ranks must call collectives equally often"
    rows = loaders[0].rows
    assert len(rows) == min(split.rows, max_rows or split.rows)
    assert sorted(set(rows.tolist())) == rows.tolist()
    count = sum(batch.token_count for of_rank in batches for batch in of_rank)
    assert count == split.targets_in_rows(rows)
    if max_rows == 7:
        assert rows[-1] >= split.rows * 6 // 7, "a sample must be spread over the split"


def test_bytes_of_the_targets(shards: ShardSet) -> None:
    split = shards.valid
    assert EvalLoader(split, ROW, 3).text_bytes == split.text_bytes
    assert 0 < EvalLoader(split, ROW, 3, max_rows=1).text_bytes <= split.text_bytes


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("max_rows", [None, 2, 9])
def test_evaluation_knows_the_domain_of_every_row(
    tmp_path: Path, texts: list[str], world: int, max_rows: int | None
) -> None:
    split = write_shards(tmp_path / "shards", texts, domains=("a", "b", "c")).train
    loaders = [EvalLoader(split, ROW, 3, max_rows, rank, world) for rank in range(world)]
    found = dict.fromkeys(loaders[0].domain_bytes, 0)
    for step, batches in enumerate(zip(*loaders, strict=True)):
        assert len({len(batch.domains) for batch in batches}) == 1, "ranks must call collectives equally often"
        for loader, batch in zip(loaders, batches, strict=True):
            rows = loader.rows[(step * world + loader.rank) * 3 :][:3].tolist()
            expected = [{piece.domain for piece in split.pieces(row)} for row in rows]
            of_rows = [
                {name for name, mask in batch.domains.items() if mask[number]} for number in range(len(batch.ids_BT))
            ]
            assert of_rows == (expected or [set()])
            for name, mask in batch.domains.items():
                found[name] += int(batch.weights_BT[mask].sum())
    assert sum(found.values()) == split.targets_in_rows(loaders[0].rows)
    assert sum(loaders[0].domain_bytes.values()) == loaders[0].text_bytes


def test_text_of_one_domain_is_not_divided(shards: ShardSet) -> None:
    loader = EvalLoader(shards.train, ROW, 3)
    assert loader.domain_bytes == {}
    assert all(batch.domains == {} for batch in loader)


def test_what_does_not_fit_is_refused(shards: ShardSet) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_rows=4 must be a multiple .*micro_batch_rows=2 times the 3"):
        train_loader(shards.train, world_size=3)
    with pytest.raises(ShardError, match=r"rows of 16 tokens, the configuration says data\.row_length=32"):
        TrainLoader(shards.train, row_length=32, batch_rows=4, micro_batch_rows=2, seed=1)
    with pytest.raises(ShardError, match="row_length=8"):
        EvalLoader(shards.valid, 8, 1)
    with pytest.raises(ValueError, match="step=-1 is negative"):
        train_loader(shards.train).micro_batches(-1)


def test_weights_of_the_shards_reach_the_batch(tmp_path: Path, texts: list[str]) -> None:
    """By the id of the target: two ids have weights of their own; the shards are those of the unweighted otherwise."""
    plain = write_shards(tmp_path / "plain", texts).train
    first, second = np.argsort(-plain.token_counts())[:2].tolist()
    weighted = write_shards(tmp_path / "weighted", texts, weights={first: 0.0, second: 2.5})
    split = weighted.train
    for step in range(6):
        loader = train_loader(split)
        for batch, without in zip(loader.micro_batches(step), train_loader(plain).micro_batches(step), strict=True):
            assert torch.equal(batch.targets_BT, without.targets_BT)
            assert torch.equal(batch.cu_seqlens_N, without.cu_seqlens_N)
            expected = without.weights_BT.clone()
            expected[(without.targets_BT == first) & (without.weights_BT > 0)] = 0
            expected[(without.targets_BT == second) & (without.weights_BT > 0)] = 2.5
            assert torch.equal(batch.weights_BT, expected)
        # sums of halves below 2^24 are exact in float32
        total = sum(float(batch.weights_BT.sum()) for batch in loader.micro_batches(step))
        assert loader.micro_batches(step)[0].token_count == total
    for batch in EvalLoader(weighted.valid, ROW, 3):
        assert set(batch.weights_BT.unique().tolist()) <= {0.0, 1.0}


def test_filling_is_what_no_document_fills(tmp_path: Path, texts: list[str]) -> None:
    """A token without a loss weight is a token. Each slice of the rows has its own part of the tokens."""
    weighted = write_shards(tmp_path / "weighted", texts, weights=dict.fromkeys(range(100), 0.0))
    plain = write_shards(tmp_path / "plain", texts)
    batches = zip(EvalLoader(weighted.train, ROW, 3), EvalLoader(plain.train, ROW, 3), strict=True)
    filled = 0
    for batch, without in batches:
        assert torch.equal(is_token(batch), without.weights_BT > 0)
        assert (batch.weights_BT[is_token(batch)] == 0).any()
        filled += batch.tokens_N is not None
        for size in (2, 4):
            for rank, expected in enumerate(is_token(batch).chunk(size, 1)):
                part = batch.of_slice(rank, size)
                assert (part.tokens_N is None) == (batch.tokens_N is None), "slices make their calls together"
                mine = torch.zeros_like(part.targets_BT, dtype=torch.bool)
                mine.view(-1)[slice(None) if part.tokens_N is None else part.tokens_N] = True
                assert torch.equal(mine, expected)
    assert 0 < filled < len(EvalLoader(plain.train, ROW, 3)), "both kinds of batches are needed"


def test_a_batch_without_weights_is_not_divided_by_nothing(tmp_path: Path, texts: list[str]) -> None:
    split = write_shards(tmp_path / "s", texts, weights=dict.fromkeys(range(320), 0.0)).train
    (batch, _) = train_loader(split).micro_batches(0)
    assert (float(batch.weights_BT.sum()), batch.token_count) == (0, 1)


def test_ranks_that_come_and_go_in_mid_epoch_leave_the_sequence_alone(tmp_path: Path) -> None:
    """World size 1, then 3, then 2, over an epoch of 10,007 rows: nothing skipped, nothing repeated."""
    rows = 10_007
    folder = tmp_path / "shards"
    folder.mkdir()
    with SplitWriter(folder, "train", vocab_size=rows + 1, shard_tokens=3000, row_length=2) as writer:
        for number in range(rows):  # of each the row: (end of text, number), its number the first target
            writer.add(np.array([number + 1, 0]), 1)
        entry = writer.close()
    index = {"vocab_size": rows + 1, "row_length": 2, "end_of_text_id": 0, "shard_tokens": 3000, "dtype": "<u2"}
    split = Split(SimpleNamespace(path=folder), "train", entry, index)  # type: ignore[arg-type]
    assert split.rows == rows

    def global_batch(step: int, world: int) -> list[int]:
        ranks = [
            TrainLoader(split, row_length=2, batch_rows=12, micro_batch_rows=2, seed=7, rank=rank, world_size=world)
            for rank in range(world)
        ]
        dealt = [loader.micro_batches(step) for loader in ranks]
        return [
            number for at in range(6 // world) for rank in dealt for number in (rank[at].targets_BT[:, 0] - 1).tolist()
        ]

    steps = -(-rows // 12)
    alone = [number for step in range(steps) for number in global_batch(step, 1)]
    assert sorted(alone[:rows]) == list(range(rows))
    changing = [
        number for step in range(steps) for number in global_batch(step, 1 if step < 300 else 3 if step < 571 else 2)
    ]
    assert changing == alone


class _Counting(TrainLoader):
    """Notes the steps that it was asked for, and has no batch of step 5."""

    def micro_batches(self, step: int) -> list[Batch]:
        self.asked = [*getattr(self, "asked", []), step]
        if step == 5:
            raise ShardError("row 7 is damaged")
        return super().micro_batches(step)


def test_what_is_made_ahead_is_what_the_loader_makes(tmp_path: Path) -> None:
    split = write_shards(tmp_path / "shards", [f"text number {number} of some" for number in range(60)]).train
    sizes = {"row_length": ROW, "batch_rows": 4, "micro_batch_rows": 2, "seed": 3}
    plain, counting = TrainLoader(split, **sizes), _Counting(split, **sizes)
    with Prefetcher(counting, 5, torch.device("cpu")) as ahead:
        for step in (2, 3, 4):  # as a resumed run begins
            for made, wanted in zip(ahead.micro_batches(step), plain.micro_batches(step), strict=True):
                assert made.step == wanted.step == step
                for name in ("ids_BT", "targets_BT", "weights_BT", "cu_seqlens_N"):
                    assert torch.equal(getattr(made, name), getattr(wanted, name))
    assert counting.asked == [2, 3, 4]  # none twice, none behind the end


def test_an_error_made_ahead_is_raised_by_the_call_for_its_step(tmp_path: Path) -> None:
    split = write_shards(tmp_path / "shards", [f"text number {number} of some" for number in range(60)]).train
    counting = _Counting(split, row_length=ROW, batch_rows=4, micro_batch_rows=4, seed=3)
    with Prefetcher(counting, 9, torch.device("cpu")) as ahead:
        assert ahead.micro_batches(4)[0].step == 4
        with pytest.raises(ShardError, match="row 7"):
            ahead.micro_batches(5)
    with Prefetcher(counting, 9, torch.device("cpu")) as ahead:  # and one that nobody asks for is not raised
        ahead.micro_batches(4)
