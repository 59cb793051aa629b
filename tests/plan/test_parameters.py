"""Parameter counts: of the shipped sizes against the published table, of a small model against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.config.schema_prediction import Prediction
from cdrmix.plan.parameters import count_parameters, parameter_table

CONFIGS = Path(__file__).parents[2] / "configs"
# (stored, active): with 3 d^2 for a time-mix block, 2 d h for an expert, and two of eight experts active.
PUBLISHED = {"1b": (4.1e9, 1.4e9), "4b": (16e9, 5e9), "40b": (112e9, 35e9), "200b": (670e9, 205e9)}
# RWKV-7 has four matrices of d x d where the published formula counts three, and low-rank maps of 2 d (2 r_w + r_v +
# r_g), about 0.5 d^2 at these widths. Three quarters of the layers, so 3/4 (1 + 0.5) d^2 = 1.1 d^2 a layer more; the
# formula's active layer is 4 d h + (3/4 * 3 + 1/4 * 4) d^2, 12 d^2 at h = 2.25 d to 14 d^2 at 2.67 d: at most 9 %, of
# which the embedding and the table's rounding leave 7 %. Of the stored parameters it is far less.
TOLERANCE = 0.07


@pytest.mark.parametrize("size", PUBLISHED)
@pytest.mark.parametrize("kind", ["core", "reason"])
def test_the_shipped_sizes_are_those_of_the_table(kind: str, size: str) -> None:
    config = Config.from_yaml(CONFIGS / f"cdrmix-{kind}-{size}.yaml")
    count = count_parameters(config.model)
    assert (count.total_stored, count.total_active) == pytest.approx(PUBLISHED[size], rel=TOLERANCE)


def small(**changes: object) -> Model:
    return Model(
        vocab_size=300,
        d_model=64,
        layers=4,
        attention=Attention(heads=4, kv_heads=2),
        rwkv=Rwkv(head_size=16, decay_rank=4, iclr_rank=6, value_rank=8, gate_rank=10),
        feed_forward=FeedForward(hidden=48, experts=8, top_k=3),
    ).model_copy(update=changes)


def test_a_small_model_has_exactly_the_parameters_counted_by_hand() -> None:
    count = count_parameters(small())
    d, hidden, experts, layers = 64, 48, 8, 4  # layer 3 is attention
    vectors = 6 + 1 + 1 + 3 + 2  # token-shift mixes; w0; a0; k_k, k_a, r_k; the group norm's weight and bias
    first = 4 * d * d + 2 * d * (4 + 6 + 10) + vectors * d
    later = first + 2 * d * 8 + d  # and the value residual
    expected = {
        "embedding": 300 * d,
        "attention": 2 * d * d + 2 * d * (2 * 16),
        "time-mix": first + 2 * later,
        "mamba": 0,
        "router": layers * experts * d,
        "experts": layers * experts * 2 * d * hidden,
        "feed-forward": 0,
        "channel-mix": 0,
        "norms": (2 * layers + 2) * 2 * d,
        "head": 0,
        "prediction": 0,
        "adapters": 0,
        "stage B heads": 0,
    }
    assert count.stored == expected
    assert count.active == expected | {"experts": layers * 3 * 2 * d * hidden}
    assert count.total_stored - count.total_active == layers * (8 - 3) * 2 * d * hidden


def test_untied_swiglu_and_dense_parts_are_counted_where_they_belong() -> None:
    d, hidden = 64, 48
    gated = count_parameters(
        small(tie_embeddings=False, feed_forward=FeedForward(hidden=hidden, experts=4, activation="swiglu"))
    )
    assert gated.stored["head"] == gated.active["head"] == 300 * d
    assert gated.stored["experts"] == 4 * 4 * 3 * d * hidden == 2 * gated.active["experts"]
    dense = count_parameters(small(feed_forward=FeedForward(kind="channel_mix", hidden=hidden)))
    assert dense.stored["channel-mix"] == dense.active["channel-mix"] == 4 * (2 * d * hidden + d)
    assert dense.stored["experts"] == dense.stored["router"] == 0
    for activation, matrices in (("swiglu", 3), ("relu2", 2)):
        of_a_transformer = count_parameters(
            small(feed_forward=FeedForward(kind="dense", hidden=hidden, activation=activation))
        )
        assert of_a_transformer.stored["feed-forward"] == 4 * matrices * d * hidden
        assert of_a_transformer.active == of_a_transformer.stored
        assert of_a_transformer.stored["experts"] == of_a_transformer.stored["router"] == 0


def test_mamba_blocks_are_counted_by_hand_too() -> None:
    d, inner, states, heads, width = 64, 128, 2 * 16, 16, 4  # expand 2, two groups of d_state 16, head_dim 8
    mamba = Mamba(d_state=16, head_dim=8, groups=2, conv_width=width)
    layers = {"mamba2": [0], "routing_mamba": [2]}
    count = count_parameters(small(mamba=mamba, mixer_layers=layers))
    # Taps and biases of the convolution; A_log, D, dt_bias; norm; B, C and the step; and, of mamba2, gate, x, output.
    shared = (inner + 2 * states) * (width + 1) + 3 * heads + inner + d * (2 * states + heads)
    assert count.stored["mamba"] == count.active["mamba"] == 2 * shared + 3 * d * inner
    assert count.stored["router"] == 5 * 8 * d
    assert count.stored["experts"] == 4 * 8 * 2 * d * 48 + 8 * 3 * d * inner
    assert count.active["experts"] * 8 == count.stored["experts"] * 3
    assert count.stored["time-mix"] < count_parameters(small()).stored["time-mix"]


def test_the_first_time_mix_block_has_no_value_residual_wherever_it_stands() -> None:
    plain = count_parameters(small(attention_fraction=0.0, layers=1)).stored["time-mix"]
    later = small(attention_fraction=0.0, layers=2, mixer_layers={"mamba2": [0]})
    assert count_parameters(later).stored["time-mix"] == plain


def test_the_table_is_aligned_and_says_how_far_both_totals_are_from_the_name() -> None:
    config = Config.from_yaml(CONFIGS / "cdrmix-core-1b.yaml")
    count = count_parameters(config.model)
    lines = parameter_table(config, count).splitlines()
    total, of_name = (next(line for line in lines if line.startswith(start)) for start in ("total", "of 1b"))
    fields = of_name.removeprefix("of 1b").split()
    numbers = (count.total_stored, count.total_active)
    assert [float(fields[0]), float(fields[2])] == [round(number / 1e9, 2) for number in numbers]
    columns = total.index(f"{count.total_stored:,}") + len(f"{count.total_stored:,}"), len(total)
    assert (of_name.index(" x") + 2, of_name.index(" x", columns[0]) + 2) == columns


def test_further_depths_are_counted_by_hand() -> None:
    d, further, norm = 64, 3, 2 * 64
    mixer = 2 * d * d + 2 * d * (2 * 16)  # attention, as above
    dense = 3 * d * (3 * 48)  # SwiGLU of the width of top_k experts
    by_hand = {
        "shared": 0,
        "maps": further * (d * d + norm),
        "heads": further * 300 * d,
        "chain": further * (2 * d * 2 * d + 2 * d * d + 3 * norm),
        "sequential": further * (2 * d * d + mixer + dense + 5 * norm),
    }
    plain = count_parameters(small())
    for kind, expected in by_hand.items():
        section = Prediction(tokens=1 + further, kind=kind)  # type: ignore[arg-type]
        ffn = FeedForward(hidden=48, experts=8, top_k=3, activation="swiglu")
        count = count_parameters(small(prediction=section, feed_forward=ffn))
        assert count.stored["prediction"] == count.active["prediction"] == expected, kind
        assert count.stored["embedding"] == plain.stored["embedding"]
