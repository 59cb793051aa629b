"""Generation with models of transformers: a continued row has the hidden states of one pass."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.errors import ConfigError
from cdrmix.hf.foreign import ForeignModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
architectures: Any = importlib.import_module("hf_architectures")
sys.path.remove(str(BENCHMARKS))
tiny = architectures.tiny


def build(architecture: str) -> ForeignModel:
    torch.manual_seed(0)
    section = HuggingFaceModel(kind="huggingface", random={"model_type": architecture, "vocab_size": 320})
    return ForeignModel(AutoModelForCausalLM.from_config(tiny(architecture)).eval(), section)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "nemotron_h", "bamba", "mamba2", "mamba"])
def test_a_continued_row_is_that_of_one_pass(architecture: str) -> None:
    model, ids = build(architecture), torch.arange(5, 17).unsqueeze(0)
    with torch.no_grad():
        wanted = model(ids).hidden_BTD
        output = model(ids[:, :9], return_cache=True)
        found = [output.hidden_BTD]
        for position in range(9, 12):
            output = model(ids[:, position : position + 1], cache=output.cache, return_cache=True)
            found.append(output.hidden_BTD)
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent_gemma has no cache"):
        build("recurrent_gemma")(torch.arange(4).unsqueeze(0), return_cache=True)


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_text_longer_than_the_table_of_positions_is_refused(architecture: str) -> None:
    """Not a row of documents that fit, and not a model without such a table."""
    model, ids = build(architecture), torch.ones(1, 513, dtype=torch.long)
    message = f"{architecture} reads at most 512 tokens, and a text has 513"
    with torch.no_grad():
        cache = model(ids[:, :512], return_cache=True).cache
        with pytest.raises(ConfigError, match=message):
            model(ids[:, :1], cache=cache, return_cache=True)
        with pytest.raises(ConfigError, match=message):
            model(ids)
        loss, starts = model.loss_model(), torch.tensor([0, 13, 513], dtype=torch.int32)
        assert loss(ids, ids, torch.ones(1, 513), starts, 513.0).total.isfinite()
        with pytest.raises(ConfigError, match=message):
            loss(ids, ids, torch.ones(1, 513), starts[::2], 513.0)
        assert build("llama")(ids).hidden_BTD.shape[1] == 513
