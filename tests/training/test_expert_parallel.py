"""Expert parallelism trains as whole experts do, at every ZeRO stage, and so do its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.errors import ConfigError
from cdrmix.model.feed_forward.expert_parallel import arrived_order
from cdrmix.training.launch import check_processes

# As in test_engine.py: both sides add the same fp32 terms in another order; here the last of three steps has the
# rounding of the two before it in its weights. An average left undone would be an error of 0.5 or more.
TOLERANCE = 1e-5


def told(work: Any, folder: Path, processes: int, load: list[tuple[str, int, int]]) -> dict[str, Any]:
    where = folder / f"told-{processes}.json"
    options = {"folder": str(folder), "parallel": "2", "load": json.dumps(load)}
    # One block more, of a mixer whose experts every process holds whole.
    overrides = ("model.layers=3", "model.mixer_layers={routing_mamba: [2]}", "model.mamba={d_state: 8, head_dim: 8}")
    finished = work("experts", where, *overrides, processes=processes, **options)
    assert [process.returncode for process in finished] == [0] * processes, "\n".join(f.stdout for f in finished)
    print(where.read_text())  # the figures, for who wants them: pytest -rP
    found: dict[str, Any] = json.loads(where.read_text())
    return found


def check(results: dict[str, Any]) -> None:
    for stage in (0, 1, 2, 3):
        for what, error in results[f"steps {stage}"].items():
            assert error < TOLERANCE, (stage, what)
    for name, found in results.items():
        if name.startswith("loaded"):
            # The same bits: the product of a row with a matrix does not depend on the number of other rows.
            assert found.pop("logits") == 0.0, name
            assert all(found.values()), (name, found)


@pytest.mark.slow
def test_two_processes_with_half_the_experts_each_and_four_with_two_copies(work, tmp_path: Path) -> None:
    """One test, since four processes load what two have saved."""
    results = told(work, tmp_path, 2, [("saved-2-0", 0, 1), ("saved-2-3", 0, 1), ("saved-2-0", 3, 2)])
    check(results)
    assert results["resumed"] == [True, True]
    for stage in (0, 1, 3):  # as in test_engine.py: a power of two changes no bit, and an overflow no weight
        assert set(results[f"scaled {stage}"].values()) == {0.0}, stage
    for case, error in results["layer"].items():
        # Sums of at most 15 * 2 rows and 32 columns in float64.
        assert error < 1e-12, case

    load = [("saved-2-0", 0, 4), ("saved-2-3", 0, 4), ("saved-4-0", 3, 4), ("saved-4-3", 1, 2)]
    check(told(work, tmp_path, 4, load))


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_arrived_rows_are_ordered_by_expert_then_sender(counts: list[list[int]]) -> None:
    expert_N = [expert for sender in counts for expert, rows in enumerate(sender) for _ in range(rows)]
    order_N, found_N = arrived_order(torch.tensor(counts), len(expert_N))
    assert found_N.tolist() == expert_N
    assert order_N.tolist() == sorted(range(len(expert_N)), key=lambda row: expert_N[row])


def test_shares_must_be_even(make_config) -> None:
    with pytest.raises(ConfigError, match=r"train\.expert_parallel(.|\n)*must divide model\.feed_forward\.experts=4"):
        make_config("train.expert_parallel=3")
    with pytest.raises(ConfigError, match="which has no experts"):
        make_config("train.expert_parallel=2", "model.feed_forward.kind=channel_mix")
    config = make_config("train.expert_parallel=4", "train.micro_batch_rows=1")
    check_processes(config, 4)
    with pytest.raises(ConfigError, match=r"must divide the number of processes \(--nproc\), 2; found 4"):
        check_processes(config, 2)
