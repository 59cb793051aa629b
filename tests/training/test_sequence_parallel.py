"""Processes that share the tokens of each row train as one process with whole rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cdrmix.errors import ConfigError
from cdrmix.model.sequence import SequenceGroup, slice_of
from cdrmix.plan.memory import memory_of
from cdrmix.training.build import build_loss_model
from cdrmix.training.launch import check_processes

Told = Callable[..., dict[str, float]]
HEADS = ("model.attention.heads=4", "model.attention.kv_heads=2", "model.bigrams={rows: 50}")
DEPTH = "model.depth={capacity: 0.5}"


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_slices_give_the_gradients_of_whole_rows(told: Told, hybrid: tuple[str, ...], processes: int) -> None:
    parallel = f"train.sequence_parallel={processes}"
    for case, error in told("sequence_worker.py", "slices", processes, *hybrid, *HEADS, DEPTH, parallel).items():
        # Sums of at most 48 tokens and 64 channels in float64, through four layers and back.
        assert error < 1e-12, case


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_each_guard_of_the_slices_is_needed(told: Told, hybrid: tuple[str, ...], processes: int) -> None:
    parallel = f"train.sequence_parallel={processes}"
    for case, error in told("sequence_worker.py", "guards", processes, *hybrid, *HEADS, DEPTH, parallel).items():
        assert error > 1e-6, case


@pytest.mark.slow
def test_the_engine_trains_slices_as_whole_rows(told: Told, hybrid: tuple[str, ...]) -> None:
    """Two groups of two processes, which also share the experts; tests/cli/test_doctor.py has two processes."""
    layout = ("train.sequence_parallel=2", "train.expert_parallel=2")
    for case, error in told(
        "sequence_worker.py", "engines", 4, *hybrid, *HEADS, *layout, steps="4", stages="0123"
    ).items():
        assert error < 1e-5, case


def test_states_are_added_up_in_float32_under_autocast() -> None:
    class Alike(SequenceGroup):
        """Every process has the same slice."""

        def gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x] * self.size)

    here, _ = slice_of(Alike(None, 2, 3), None, rows=2, length=12, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    final, transition = (torch.randn(2, 1, 8, 8, generator=generator) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = here.states_before(final, transition, torch.matmul)
    assert torch.equal(found, final @ transition + final)


def test_what_needs_whole_rows_is_refused(refuses: Callable[..., None], make_config, hybrid: tuple[str, ...]) -> None:
    refuses(
        (r"must divide data\.row_length=24", "train.sequence_parallel=5"),
        (r"must divide model\.attention\.heads=2", "train.sequence_parallel=3"),
        (r"at most 8: slices of 3 tokens, for model\.mamba\.conv_width", *hybrid, "train.sequence_parallel=12"),
        (r"1 with model\.prediction", "train.sequence_parallel=2", "model.prediction={tokens: 2}"),
        (r"1 with model\.depth\.part mixer", "train.sequence_parallel=2", "model.depth={capacity: 0.5, part: both}"),
        (r"1 with count of a plugin", "train.sequence_parallel=2", "model.feed_forward.kind=count"),
        (r"1 with model\.feed_forward\.drop", "train.sequence_parallel=2", "model.feed_forward.drop=true"),
        (r"train\.sequence_parallel 1", "train.sequence_parallel=2", "train.compile=true"),
    )
    make_config("train.sequence_parallel=2", DEPTH)  # of the feed-forward
    config = make_config("train.sequence_parallel=2")
    check_processes(config, 2)  # together they have the 8 rows of a micro-batch
    with pytest.raises(
        ConfigError, match=r"train\.sequence_parallel: must divide the number of processes \(--nproc\), 3"
    ):
        check_processes(config, 3)
    with pytest.raises(ConfigError, match=r"the 4 processes over train\.sequence_parallel=2, 16; found 8"):
        check_processes(config, 4)
    with pytest.raises(ConfigError, match=r"needs a multiple of as many processes"):
        build_loss_model(config)


def test_a_plan_has_the_activations_of_a_slice(make_config, hybrid: tuple[str, ...]) -> None:
    def planned(processes: int) -> dict[str, int]:
        long = ("data.row_length=8192", "train.micro_batch_rows=1", "model.attention.heads=4", "model.d_model=256")
        long += ("model.rwkv.head_size=32", "model.mamba.head_dim=32", "train.precision=bf16")
        config = make_config(*hybrid, *long, f"train.sequence_parallel={processes}")
        return {each.name: each.bytes for each in memory_of(config, "cuda", processes).components}

    one, two, four = planned(1), planned(2), planned(4)
    # A slice has in addition the inputs of the recurrences that are exchanged, so more than its part of the tokens.
    assert 0.5 * one["activations"] < two["activations"] < 0.7 * one["activations"]
    assert 0.5 * two["activations"] < four["activations"] < 0.6 * two["activations"]
    assert one["weights"] == two["weights"]
