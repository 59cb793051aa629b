"""Output heads of transformers: the formula that the test at the start finds, the loss, padding of the vocabulary."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from cdrmix.errors import ConfigError
from cdrmix.hf import head
from cdrmix.hf.head import Head, head_layer, head_logits, head_loss, probe_head

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
architectures: Any = importlib.import_module("hf_architectures")
sys.path.remove(str(BENCHMARKS))
tiny = architectures.tiny

VOCAB = 320
KINDS = {
    "llama": "linear",
    "gpt2": "linear",
    "nemotron_h": "linear",
    "granite": "scaled",
    "cohere": "scaled",
    "falcon_h1": "scaled",
    "phi": "bias",
    "gptj": "bias",
    "gemma2": "softcap",
    "recurrent_gemma": "softcap",
}


def build(architecture: str, dtype: torch.dtype = torch.float32, factor: float = 40.0) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(architecture, VOCAB), dtype=dtype)
    with torch.no_grad():  # logits large enough to see a softcap, and a bias that is not 0
        head_layer(model).weight.mul_(factor)
        if head_layer(model).bias is not None:
            head_layer(model).bias.normal_()
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, VOCAB, (2, 2, 24), generator=generator)
    return ids, targets, torch.rand(2, 24, generator=generator)


def loss_and_gradients(model: PreTrainedModel, loss: Tensor) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("architecture", KINDS)
def test_the_loss_is_that_of_the_models_own_logits(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused or by chunks: 48 tokens are three chunks, the last one shorter."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 20 * VOCAB * 4)
    model = build(architecture)
    ids, targets, weights = batch()
    found, layer = probe_head(model), head_layer(model)
    assert found.kind == KINDS[architecture]
    assert found.fused is (found.kind in ("linear", "scaled"))
    logits = model(input_ids=ids, use_cache=False).logits
    own = (
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()
    ).sum()
    wanted, wanted_gradients = loss_and_gradients(model, own)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(head_logits(found, layer, hidden), logits, rtol=1e-6, atol=1e-5)
    ours = head_loss(found, layer, hidden.flatten(0, 1), targets.flatten(), weights.flatten())
    loss, gradients = loss_and_gradients(model, ours)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("architecture", KINDS)
def test_sets_of_weights_give_a_loss_each(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As preferences need them: of the same tokens, the loss of each answer."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 20 * VOCAB * 4)
    model = build(architecture)
    ids, targets, weights = batch()
    found, layer = probe_head(model), head_layer(model)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    sets = torch.stack([weights.flatten(), 1 - weights.flatten(), torch.zeros(48)])
    together = head_loss(found, layer, hidden, targets.flatten(), sets)
    alone = torch.stack([head_loss(found, layer, hidden, targets.flatten(), each) for each in sets])
    torch.testing.assert_close(together, alone)
    assert together[2] == 0


@pytest.mark.parametrize("architecture", KINDS)
def test_the_formula_is_found_in_bfloat16_and_without_a_trace(architecture: str) -> None:
    exact, model = probe_head(build(architecture)), build(architecture, torch.bfloat16).train()
    state = torch.get_rng_state()
    found = probe_head(model)
    assert (found.kind, found.softcap) == (exact.kind, exact.softcap)
    assert found.scale == pytest.approx(exact.scale, rel=1e-3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert not head_layer(model)._forward_pre_hooks
    assert not head_layer(model)._forward_hooks


@pytest.mark.parametrize(("architecture", "cap"), [("gemma2", 30.0), ("recurrent_gemma", 30.0), ("llama", None)])
def test_a_softcap_is_found_though_the_logits_are_small(architecture: str, cap: float | None) -> None:
    assert probe_head(build(architecture, factor=1.0)).softcap == cap


@pytest.mark.parametrize("architecture", ["llama", "cohere", "gemma2"])
def test_padding_of_the_vocabulary_takes_no_probability(architecture: str) -> None:
    model = build(architecture)
    ids, targets, weights = batch()
    found = probe_head(model)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.detach().flatten(0, 1)

    def loss(vocab_size: int | None) -> tuple[float, list[Tensor]]:
        return loss_and_gradients(
            model, head_loss(found, head_layer(model), hidden, targets.flatten(), weights.flatten(), vocab_size)
        )

    wanted, wanted_gradients = loss(None)
    model.resize_token_embeddings(384, mean_resizing=False)
    with torch.no_grad():
        head_layer(model).weight[VOCAB:] = 3.0  # logits that would take probability
    assert probe_head(model) == found
    assert loss(None)[0] > 1.001 * wanted
    padded, gradients = loss(VOCAB)
    assert padded == pytest.approx(wanted, rel=1e-6)
    weight_gradient = gradients[-1] if architecture == "llama" else gradients[0]
    expected = wanted_gradients[-1] if architecture == "llama" else wanted_gradients[0]
    torch.testing.assert_close(weight_gradient[:VOCAB], expected)
    assert weight_gradient.shape == (384, 64)
    assert not weight_gradient[VOCAB:].any()
    assert head_logits(found, head_layer(model), hidden, VOCAB).shape == (48, VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits * logits.abs(), "output head of llama"),
        (lambda logits: 0.5 * logits.where(logits < 0, torch.nan), "the logits of llama are NaN or infinite"),
    ],
)
def test_an_unknown_head_and_logits_that_are_not_numbers_are_refused(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    model = build("llama")
    forward = model.forward

    def changed(input_ids: Tensor, use_cache: bool) -> object:
        output = forward(input_ids=input_ids, use_cache=use_cache)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    with pytest.raises(ConfigError, match=message) as refused:
        probe_head(model)
    assert refused.value.exit_code == 2


def test_a_head_that_reads_other_hidden_states_is_refused() -> None:
    model = build("llama")
    assert probe_head(model, lambda ids: model(input_ids=ids, use_cache=False).logits) == Head()
    model.lm_head.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1.0,))
    with pytest.raises(ConfigError, match="formula that cdrmix does not know"):
        probe_head(model)
