"""Summaries, and episodic memories in RAM, which behave like those on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cdrmix.reason.heads import Summariser
from cdrmix.reason.memory.episode_log import NEVER
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import EpisodesInMemory, EpisodicMemory, Staged

DIM = 8


@pytest.mark.parametrize(("length", "count"), [(16, 2), (3, 1), (17, 3), (8, 1)])
def test_summaries_are_of_the_means_of_strides(length: int, count: int) -> None:
    torch.manual_seed(1)
    summariser = Summariser(12, 5, 8)
    hidden = torch.randn(4, length, 12, dtype=torch.float64)
    summariser.double()
    found = summariser(hidden)
    assert found.shape == (4, count, 5)
    for position in range(count):
        mean = hidden[:, 8 * position : 8 * position + 8].mean(1)
        torch.testing.assert_close(found[:, position], functional.linear(mean, summariser.down.weight))
    assert summariser.count(length) == count
    assert summariser.prefix(found).shape == (4, count, 12)
    for vectors in (summariser.keys(found), summariser.queries(found)):
        assert vectors.shape == (4, 5)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))


def test_a_summary_is_causal() -> None:
    """Later tokens do not change the summary of a stride."""
    summariser = Summariser(12, 5, 8)
    hidden = torch.randn(1, 24, 12)
    later = hidden.clone()
    later[:, 16:] += 1
    assert torch.equal(summariser(hidden)[:, :2], summariser(later)[:, :2])


steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from([NEVER, 2, 5])), max_size=3),
        st.integers(0, 20),  # what is searched for, and used
    ),
    max_size=12,
)


def key(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


@given(made=steps)
def test_both_kinds_of_memory_do_the_same(made: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Search, use, expiry, eviction, ids: the same changes give the same hits."""
    memories: list[EpisodicMemory] = [
        EpisodicIndex(tmp_path_factory.mktemp("index"), DIM, 30),
        EpisodesInMemory(DIM, 30),
    ]
    for step, (episodes, sought) in enumerate(made):
        found = []
        for memory in memories:
            staged = Staged()
            (hits,) = memory.search(key(sought)[None], 4, step)
            staged.use(hits[:1])
            for seed, length, lives in episodes:
                staged.add(key(seed), np.full(length, seed, np.uint32), NEVER if lives == NEVER else step + lives)
            ids = memory.commit(staged, step)
            kept = [id for id in range(60) if id in memory]
            found.append(([(hit.id, hit.tokens.tolist()) for hit in hits], ids, kept, len(memory)))
            scores = [hit.score for hit in hits]
            assert scores == sorted(scores, reverse=True)
        assert found[0] == found[1]


def test_nothing_staged_is_found_before_it_is_committed(tmp_path: Path) -> None:
    for memory in (EpisodesInMemory(DIM, 30), EpisodicIndex(tmp_path, DIM, 30)):
        staged = Staged()
        staged.add(key(1), np.arange(4, dtype=np.uint32))
        assert memory.search(key(1)[None], 1, 0) == [[]]
        memory.commit(staged, 0)
        assert memory.search(key(1)[None], 1, 0)[0][0].id == 0
