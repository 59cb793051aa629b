"""Batch warm-up in the configuration: the rows of each step, what is refused, and the steps for a number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.batch_sizes import BatchSizes
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

RUN = """\
model: {d_model: 128, layers: 4, attention: {heads: 4}, feed_forward: {hidden: 256}}
train:
  steps: 500
  batch_rows: 16
  micro_batch_rows: 4
  learning_rate: 3e-3
"""


@given(*(st.integers(1, most) for most in (6, 9, 20)), st.integers(0, 60), st.integers(0, 10))
def test_batches_grow_on_a_line_by_what_processes_share(micro: int, first: int, rows: int, steps: int, after: int):
    sizes = BatchSizes(micro * max(first, rows), micro * first, steps)
    total = 0
    for step in range(steps + after):
        assert sizes.before(step) == total
        at = sizes.at(step)
        total += at
        exact = sizes.first + (sizes.rows - sizes.first) * min(1.0, step / steps if steps else 1.0)
        assert exact - sizes.unit < at <= exact + 1e-9 * sizes.rows
        assert at % sizes.unit == sizes.unit % micro == 0
        assert sizes.share(step) == at / sizes.rows
    assert sizes.before(steps) == steps * sizes.rows - sizes.missing


def test_the_rows_before_a_late_step_take_no_time() -> None:
    sizes = BatchSizes(4096, 32, 10**9)
    step = 5 * 10**6  # the line rises by 0.6 units up to here, so every step before has the rows of the first
    assert sizes.before(step) == 32 * step
    assert sizes.before(10**12) == 10**12 * 4096 - sizes.missing


def test_messages_name_the_first_and_the_last_batch() -> None:
    assert BatchSizes(256, 256, 0).text == "256 rows"
    assert BatchSizes(256, 32, 9).text == "32 to 256 rows"


def test_a_negative_step_is_refused() -> None:
    for of_step in (BatchSizes(8, 8, 0).at, BatchSizes(8, 4, 2).before):
        with pytest.raises(ValueError, match="step=-1 is negative"):
            of_step(-1)


@pytest.mark.parametrize(
    ("section", "key", "allowed"),
    [
        ("{rows: 6, steps: 10}", "rows: found 6", "a multiple of train.micro_batch_rows=4 below train.batch_rows=16"),
        ("{rows: 16, steps: 10}", "rows: found 16", "a multiple of train.micro_batch_rows=4 below train.batch_rows=16"),
        (
            "{rows: 4, steps: 10}\n  micro_batch_rows: 16",
            "rows: found 4",
            "null, or train.micro_batch_rows below train.batch_rows=16; found 16",
        ),
        ("{rows: 4, steps: 500}", "steps: found 500", "below train.steps=500"),
        ("{rows: 0, steps: 5}", "rows: found 0", "an integer of at least 1"),
        ("{rows: 4, steps: 1.5}", "steps: found 1.5", "an integer of at least 1"),
        ("{rows: 4}", "steps: missing", "an integer of at least 1"),
        ("{rows: 4, step: 5}", "step: unknown key", "in train.batch_warmup: rows, steps"),
        ("4", ": found 4", ""),
    ],
)
def test_what_is_refused_is_said_with_its_line(tmp_path: Path, section: str, key: str, allowed: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN}  batch_warmup: {section}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    said = str(caught.value)
    assert "run.yaml:7: train.batch_warmup" in said
    assert key in said
    assert f"allowed: {allowed}" in said


def test_the_section_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN, encoding="utf-8")
    plain = Config.from_yaml(path)
    assert plain.train.batch_sizes == (16, 16, 0)
    assert Config.from_yaml(path, ["train.batch_warmup={rows: 4, steps: 5}"]).hash() != plain.hash()


LADDER = """\
model: {size: dense-50m}
data: {row_length: 2048}
train: {hyperparameters: step-law, tokens_per_parameter: 20, micro_batch_rows: 8}
"""


def test_a_number_of_tokens_takes_more_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LADDER, encoding="utf-8")
    constant = Config.from_yaml(path).train
    grown = Config.from_yaml(path, ["train.batch_warmup={rows: 8, steps: 3000}"]).train
    assert (grown.batch_rows, grown.learning_rate) == (constant.batch_rows, constant.learning_rate)
    assert grown.steps > constant.steps + 1000
    read = [train.batch_sizes.before(train.steps) for train in (constant, grown)]
    assert abs(read[1] - read[0]) <= constant.batch_rows
    # The same rule from the steps: the tokens that they read give the learning rate.
    given_steps = f"train={{steps: {grown.steps}, batch_rows: {grown.batch_rows}, tokens_per_parameter: null}}"
    again = Config.from_yaml(path, [given_steps, "train.batch_warmup={rows: 8, steps: 3000}"]).train
    assert again.learning_rate == pytest.approx(constant.learning_rate, rel=2e-3)


def test_the_micro_batch_of_a_rule_divides_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LADDER.replace("step-law", "svend").replace(", micro_batch_rows: 8", ""), encoding="utf-8")
    train = Config.from_yaml(path, ["train.batch_warmup={rows: 12, steps: 30}"]).train
    assert (train.batch_rows, train.micro_batch_rows) == (32, 4)
