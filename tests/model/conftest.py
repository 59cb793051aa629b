"""Toy models that the model tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")
import torch

from cdrmix.config.schema_layers import Bigrams, FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.config.schema_prediction import Prediction
from cdrmix.model.language_model import LanguageModel

MakeModel = Callable[..., LanguageModel]


@pytest.fixture
def make_model() -> MakeModel:
    """A float64 model of width 16, every parameter moved off its initial zeros so that all of them matter."""

    def make(
        *,
        seed: int = 0,
        schedule: str = "interleave-x",
        attention_fraction: float = 0.25,
        layers: int = 4,
        kind: str = "moe",
        activation: str = "relu2",
        tie_embeddings: bool = True,
        kv_heads: int = 2,
        qk_norm: bool = False,
        norm: str = "layernorm",
        d_model: int = 16,
        activation_checkpointing: bool = False,
        mixer_layers: dict[str, list[int]] | None = None,
        bias_update_rate: float = 0.0,
        prediction: Prediction | None = None,
        bigrams: Bigrams | None = None,
    ) -> LanguageModel:
        config = Model(
            vocab_size=23,
            d_model=d_model,
            layers=layers,
            schedule=schedule,  # type: ignore[arg-type]
            attention_fraction=attention_fraction,
            norm=norm,  # type: ignore[arg-type]
            tie_embeddings=tie_embeddings,
            attention=Attention(heads=2, kv_heads=kv_heads, qk_norm=qk_norm),
            mixer_layers=mixer_layers or {},
            rwkv=Rwkv(head_size=16, decay_rank=3, iclr_rank=3, value_rank=2, gate_rank=4),
            mamba=Mamba(d_state=12, head_dim=8, groups=2),
            feed_forward=FeedForward(
                kind=kind,  # type: ignore[arg-type]
                hidden=8,
                experts=4,
                top_k=2,
                activation=activation,  # type: ignore[arg-type]
                bias_update_rate=bias_update_rate,
            ),
            prediction=prediction,
            bigrams=bigrams,
        )
        torch.manual_seed(seed)
        model = LanguageModel(config, activation_checkpointing=activation_checkpointing).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        return model

    return make
