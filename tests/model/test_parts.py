"""Parts of the model: attention against its formula, parameter kinds, initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cdrmix import ops
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention as AttentionConfig
from cdrmix.config.schema_model import Model, Rwkv
from cdrmix.model.context import make_context, rotary_angles
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.layers import parameter_kinds
from cdrmix.model.mixers.attention import Attention

MakeModel = Callable[..., LanguageModel]


def test_rotation_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        at_query, at_key = (
            rotary_angles(torch.tensor([[position]]), 8, 10000.0, torch.float64) for position in (query_at, key_at)
        )
        return float((ops.apply_rotary(q, *at_query) * ops.apply_rotary(k, *at_key)).sum())

    assert math.isclose(score(9, 4), score(105, 100), abs_tol=1e-12)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-3)


def test_grouped_query_attention_equals_its_formula() -> None:
    config = Model(
        vocab_size=300,
        d_model=16,
        layers=1,
        attention=AttentionConfig(heads=4, kv_heads=2, rope=False),
        rwkv=Rwkv(head_size=16, decay_rank=2, iclr_rank=2, value_rank=2, gate_rank=2),
        feed_forward=FeedForward(hidden=8),
    )
    torch.manual_seed(0)
    attention = Attention(config, 0).double()
    torch.nn.init.normal_(attention.output.weight)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    context = make_context(config, 2, 7, torch.tensor([0, 3, 7, 14]), 0, x.device, attends=True)
    assert context.angles is None  # rope: false
    found = attention(x, context, None).y
    q, k, v = attention.query(x), attention.key(x), attention.value(x)
    expected = torch.zeros(2, 7, 16, dtype=torch.float64)
    document = [[0, 0, 0, 1, 1, 1, 1], [2] * 7]
    for b in range(2):
        for t in range(7):
            seen = [s for s in range(t + 1) if document[b][s] == document[b][t]]
            for head in range(4):
                group = slice(4 * (head // 2), 4 * (head // 2) + 4)
                query = q[b, t, 4 * head : 4 * head + 4]
                weights = torch.stack([query @ k[b, s, group] / 2 for s in seen]).softmax(0)
                expected[b, t, 4 * head : 4 * head + 4] = sum(
                    weight * v[b, s, group] for weight, s in zip(weights, seen, strict=True)
                )
    torch.testing.assert_close(found, attention.output(expected), rtol=1e-11, atol=1e-12)


def test_places_of_packed_documents(make_model: MakeModel) -> None:
    config, cu_seqlens = make_model().config, torch.tensor([0, 2, 4, 7, 8], dtype=torch.int32)
    context = make_context(config, 2, 4, cu_seqlens, 0, torch.device("cpu"), attends=True, dtype=torch.float64)
    assert context.angles is not None
    assert context.starts_BT1 is not None
    # The first pair turns by one radian a position.
    positions = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(context.angles.sine[:, :, 0, 0], positions.sin())
    assert context.starts_BT1.squeeze(-1).tolist() == [[False, False, True, False], [False, False, False, True]]
    without = make_context(config, 2, 4, cu_seqlens, 0, torch.device("cpu"), attends=False)
    assert without.angles is None


def test_parameter_kinds(make_model: MakeModel) -> None:
    model = make_model(tie_embeddings=False)
    kinds = parameter_kinds(model)
    assert (kinds["embedding.weight"], kinds["head.weight"]) == ("embedding", "head")
    assert kinds["blocks.0.mixer.w0"] == "decay_bias"
    assert kinds["blocks.0.mixer.receptance.weight"] == "projection"
    assert kinds["blocks.3.mixer.query.weight"] == "projection"
    assert kinds["blocks.0.feed_forward.w_up"] == kinds["blocks.0.feed_forward.w_down"] == "expert"
    assert kinds["blocks.0.mixer.w1"] == kinds["blocks.0.mixer.g2"] == kinds["blocks.1.mixer.v2"] == "low_rank"
    assert kinds["blocks.0.feed_forward.router.weight"] == "router"
    for name in ("mixer.r_k", "mixer.a0", "mixer.ln_x.weight", "mixer_norm.weight"):
        assert kinds[f"blocks.0.{name}"] == "vector", name


def test_first_block_has_no_value_residual_and_outputs_start_at_zero() -> None:
    config = Model(
        vocab_size=300,
        d_model=64,
        layers=3,
        attention=AttentionConfig(heads=2, kv_heads=2),
        rwkv=Rwkv(head_size=32, decay_rank=4, iclr_rank=4, value_rank=4, gate_rank=4),
        feed_forward=FeedForward(hidden=32),
    )
    model = LanguageModel(config)
    names = dict(model.named_parameters())
    assert "blocks.0.mixer.v0" not in names
    assert "blocks.1.mixer.v0" in names
    assert not names["blocks.0.mixer.output.weight"].any()
    assert not names["blocks.1.feed_forward.w_down"].any()
    # w0 runs from slow to fast decay over the channels (wkv: exp(-0.6065 sigmoid(w0)) a step).
    w0 = names["blocks.0.mixer.w0"]
    assert w0[:8].mean() < -5
    assert w0[-8:].mean() > -1
