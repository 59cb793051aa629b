"""A pure RWKV-7 model against the PyPI package `rwkv`, an independent implementation, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from public_rwkv7 import logits_of_the_package

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.errors import ConfigError
from cdrmix.hf.export_rwkv import export_official_rwkv7, official_rwkv7_weights
from cdrmix.model.language_model import LanguageModel


def pure_rwkv7(**changes: object) -> LanguageModel:
    """Two blocks of width 128, two heads of 64, every parameter moved off its initial value."""
    config = Model(
        vocab_size=300,
        d_model=128,
        layers=3,
        attention_fraction=0.0,
        norm="layernorm",
        tie_embeddings=False,
        attention=Attention(heads=2, kv_heads=2),
        rwkv=Rwkv(head_size=64, decay_rank=8, iclr_rank=8, value_rank=8, gate_rank=16),
        feed_forward=FeedForward(kind="channel_mix", hidden=512),
    ).model_copy(update=changes)
    torch.manual_seed(0)
    model = LanguageModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
            if name.endswith(("embedding.weight", "head.weight")):
                parameter += torch.randn_like(parameter)
    return model


def test_logits_agree_with_the_rwkv_package(tmp_path: Path) -> None:
    model = pure_rwkv7()
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / ".model.pth.999999999.tmp").touch()  # of a process that was killed
    export_official_rwkv7(model.config, model.state_dict(), tmp_path / "model.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]
    whole, split = logits_of_the_package(tmp_path / "model.pth", ids)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        ours = model.logits(model(tokens).hidden_BTD)[0]
        state, pieces = None, []
        for start, end in [(0, 17), (17, 31), *((t, t + 1) for t in range(31, 40))]:
            output = model(tokens[:, start:end], cache=state, return_cache=True)
            state = output.cache
            pieces.append(model.logits(output.hidden_BTD)[0])
    scale = whole.abs().max()
    assert (ours - whole).abs().max() / scale < 1e-5
    assert (torch.cat(pieces) - split).abs().max() / scale < 1e-5
    assert (ours - ours.roll(1, 0)).abs().max() / scale > 0.1  # the logits do differ from token to token


def test_a_model_without_official_form_is_refused_with_every_reason() -> None:
    model = pure_rwkv7()
    config = model.config.model_copy(
        update={
            "norm": "rmsnorm",
            "feed_forward": FeedForward(hidden=8),
            "attention_fraction": 1.0,
            "rwkv": model.config.rwkv.model_copy(update={"allow_neg_eigval": True}),
            "mixer_layers": {"mamba2": [0]},
        }
    )
    with pytest.raises(ConfigError) as raised:
        official_rwkv7_weights(config, {})
    keys = ("norm", "feed_forward.kind", "attention_fraction", "mixer_layers", "rwkv.allow_neg_eigval")
    for key in keys:
        assert f"model.{key}:" in str(raised.value)
