"""What is said about broken mixers: unknown names, layers that are not there, sizes that do not fit."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

# Lines are counted from here in the tests below.
GOOD = """\
model:
  d_model: 128
  layers: 4
  attention: {heads: 4}
  feed_forward: {hidden: 256}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""

# (what is replaced, by what, the whole message after the headline)
BROKEN = {
    "a mixer that is none": (
        "layers: 4",
        "layers: 4\n  mixer_layers: {mamba: [1]}",
        """\
        run.yaml:4: model.mixer_layers.mamba: unknown mixer
            allowed: one of the mixers attention, rwkv7, mamba2, routing_mamba
            did you mean model.mixer_layers.mamba2?""",
    ),
    "a layer that is not there": (
        "layers: 4",
        "layers: 4\n  mixer_layers:\n    mamba2: [0, 4]",
        """\
        run.yaml:5: model.mixer_layers.mamba2[1]: found 4 (an integer)
            allowed: at most 3: layers count from 0, and model.layers=4""",
    ),
    "a layer of two mixers": (
        "layers: 4",
        "layers: 4\n  mixer_layers:\n    rwkv7: [2]\n    routing_mamba: [1, 2]",
        """\
        run.yaml:6: model.mixer_layers.routing_mamba[1]: found 2 (an integer)
            allowed: each layer once in all of model.mixer_layers""",
    ),
    "Mamba heads that do not fill the width": (
        "layers: 4",
        "layers: 4\n  mixer_layers: {mamba2: [1]}\n  mamba: {head_dim: 48}",
        """\
        run.yaml:5: model.mamba.head_dim: found 48 (an integer)
            allowed: must divide model.mamba.expand * model.d_model=256""",
    ),
    "Mamba heads that do not fill the groups": (
        "layers: 4",
        "layers: 4\n  mixer_layers: {routing_mamba: [1]}\n  mamba: {groups: 3}",
        """\
        run.yaml:5: model.mamba.groups: found 3 (an integer)
            allowed: must divide model.mamba.expand * model.d_model / model.mamba.head_dim=4""",
    ),
    "attention by name alone, with heads that do not divide the width": (
        "  layers: 4\n  attention: {heads: 4}",
        "  layers: 4\n  attention_fraction: 0\n  mixer_layers: {attention: [1]}\n  attention: {heads: 3}",
        """\
        run.yaml:6: model.attention.heads: found 3 (an integer)
            allowed: must divide model.d_model=128""",
    ),
    "more experts chosen than there are, by a mixer alone": (
        "{hidden: 256}",
        "{hidden: 256, kind: channel_mix, experts: 2, top_k: 3}\n  mixer_layers: {routing_mamba: [0]}",
        """\
        run.yaml:5: model.feed_forward.top_k: found 3 (an integer)
            allowed: at most model.feed_forward.experts=2""",
    ),
    "a dense layer that is not there": (
        "{hidden: 256}",
        "\n    hidden: 256\n    dense_layers: [1, 4]",
        """\
        run.yaml:7: model.feed_forward.dense_layers[1]: found 4 (an integer)
            allowed: at most 3: layers count from 0, and model.layers=4""",
    ),
    "a layer that is dense twice": (
        "{hidden: 256}",
        "{hidden: 256, dense_layers: [1, 1]}",
        """\
        run.yaml:5: model.feed_forward.dense_layers[1]: found 1 (an integer)
            allowed: each layer once in model.feed_forward.dense_layers""",
    ),
    "dense layers of a dense model": (
        "{hidden: 256}",
        "{hidden: 256, kind: dense, dense_layers: [1]}",
        """\
        run.yaml:5: model.feed_forward.dense_layers: found a list of 1
            allowed: [] for model.feed_forward.kind=dense, which has no mixture of experts""",
    ),
    "a width of dense layers that there are not": (
        "{hidden: 256}",
        "{hidden: 256, dense_hidden: 512}",
        """\
        run.yaml:5: model.feed_forward.dense_hidden: found 512 (an integer)
            allowed: null without model.feed_forward.dense_layers""",
    ),
    "a shared expert without experts": (
        "{hidden: 256}",
        "{hidden: 256, kind: channel_mix, shared_hidden: 64}",
        """\
        run.yaml:5: model.feed_forward.shared_hidden: found 64 (an integer)
            allowed: null for model.feed_forward.kind=channel_mix""",
    ),
    "a channel-mix that skips tokens": (
        "{hidden: 256}",
        "{hidden: 256, kind: channel_mix}\n  depth: {part: both}",
        """\
        run.yaml:6: model.depth.part: found "both" (a string)
            allowed: mixer, or model.feed_forward.kind moe or dense: channel_mix does not skip tokens""",
    ),
    "mixers that skip tokens, compiled": (
        "train: {",
        "  depth: {part: mixer}\ntrain: {compile: true, ",
        """\
        run.yaml:7: train.compile: found true (true/false)
            allowed: false with model.depth.part mixer or both: mixers read as many rows as tokens are kept""",
    ),
    "weights of other depths than there are": (
        "layers: 4",
        "layers: 4\n  prediction: {tokens: 3, weights: [1, 0.5]}",
        """\
        run.yaml:4: model.prediction.weights: found a list of 2
            allowed: null, or model.prediction.tokens=3 weights""",
    ),
    "another weight of the next token than 1": (
        "layers: 4",
        "layers: 4\n  prediction: {tokens: 2, weights: [0.5, 0.5]}",
        """\
        run.yaml:4: model.prediction.weights[0]: found 0.5 (a number)
            allowed: 1: the weight of the next token""",
    ),
    "a mixer of the depths that is none": (
        "layers: 4",
        "layers: 4\n  prediction: {kind: sequential, mixer: mamba}",
        """\
        run.yaml:4: model.prediction.mixer: found "mamba" (a string)
            allowed: one of attention, rwkv7, mamba2
            did you mean mamba2?""",
    ),
    "blocks of the depths with heads that do not divide the width": (
        "  layers: 4\n  attention: {heads: 4}",
        "  layers: 4\n  attention_fraction: 0\n  prediction: {kind: sequential}\n  attention: {heads: 3}",
        """\
        run.yaml:5: model.prediction.mixer: found "attention" (a string)
            allowed: another mixer, or model.attention.heads and kv_heads that divide model.d_model evenly""",
    ),
    "depths without parameters that shall be detached": (
        "layers: 4",
        "layers: 4\n  prediction: {kind: shared, detach: true}",
        """\
        run.yaml:4: model.prediction.detach: found true (true/false)
            allowed: false, or another model.prediction.kind than shared, which has no parameters""",
    ),
    "more depths than a row has targets": (
        "  feed_forward: {hidden: 256}\n",
        "  feed_forward: {hidden: 256}\n  prediction: {tokens: 9}\ndata: {row_length: 8}\n",
        """\
        run.yaml:6: model.prediction.tokens: found 9 (an integer)
            allowed: at most data.row_length=8, or the last depth has no targets""",
    ),
    "depths to keep where there are none": (
        "train: {",
        "export: {prediction_heads: keep}\ntrain: {",
        """\
        run.yaml:6: export.prediction_heads: found "keep" (a string)
            allowed: drop without model.prediction""",
    ),
    "a rate of the head, which is the embedding": (
        "train: {",
        "train: {groups: {head: {rate: 3.0}}, ",
        """\
        run.yaml:6: train.groups.head: found a section
            allowed: no group head with model.tie_embeddings: true; the table is in the group embedding""",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    old, new, expected = BROKEN[name]
    assert old in GOOD
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    headline, *said = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert headline == "the configuration has one problem:"
    assert said == dedent(expected).splitlines()


def test_mixers_of_a_reasoning_model_skip_no_token() -> None:
    path = Path(__file__).parents[2] / "configs" / "cdrmix-reason-tiny.yaml"
    with pytest.raises(
        ConfigError, match=r"model\.depth\.part: found .mixer.*\n.*feed_forward in a run with a section"
    ):
        Config.from_yaml(path, ["model.depth.part=mixer"])
    assert Config.from_yaml(path, ["model.depth={}"]).model.skipping == ("0", "1", "2", "3")


def test_every_layer_has_the_mixer_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    model = Config.from_yaml(path).model
    assert model.mixers == ("rwkv7", "rwkv7", "rwkv7", "attention")
    assert model.routers == ("0", "1", "2", "3")
    listed = "model.mixer_layers={mamba2: [3], routing_mamba: [1, 0], attention: [2]}"
    model = Config.from_yaml(path, [listed]).model
    assert model.mixers == ("routing_mamba", "routing_mamba", "attention", "mamba2")
    assert model.routers == ("0.mixer", "0", "1.mixer", "1", "2", "3")
    dense = Config.from_yaml(path, [listed, "model.feed_forward.dense_layers=[0, 3]", "model.depth={}"]).model
    assert dense.routers == ("0.mixer", "1.mixer", "1", "2")
    assert dense.feed_forwards == ("dense", "moe", "moe", "dense")
    assert dense.skipping == ("0", "1", "2", "3")
    assert Config.from_yaml(path, [listed, "model.feed_forward.kind=channel_mix"]).model.routers == (
        "0.mixer",
        "1.mixer",
    )
