"""Changes of a model after its compiled decoding step was made: the next read has them, as the ordinary pass has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

pytest.importorskip("numba", reason="needs numba, which is not installed")

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.config.schema_reasoning import Controller, Memory, PlasticLora, Reasoning, Rl
from cdrmix.model import compiled
from cdrmix.model.decoding import prefill
from cdrmix.model.language_model import LanguageModel


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make() -> LanguageModel:
    """RWKV-7 with adapters, experts and attention; no parameter has its initial value, so that all of them matter."""
    config = Model(
        vocab_size=27,
        d_model=32,
        layers=4,
        attention_fraction=0.5,
        attention=Attention(heads=2, kv_heads=1),
        rwkv=Rwkv(head_size=16, decay_rank=3, iclr_rank=5, value_rank=2, gate_rank=7),
        feed_forward=FeedForward(hidden=13, experts=4),
        norm="layernorm",
    )
    reasoning = Reasoning(
        chunk=5,
        plastic_lora=PlasticLora(rank=3, key_width=8, alpha=0.5, decay=0.9, rwkv7=["output"]),
        controller=Controller(step_budget=8, max_branches=1),
        memory=Memory(dim=8, top_k=2, max_tokens=100),
        rl=Rl(horizon=32, latency_weight=0.01, stability_weight=0.1),
    )
    torch.manual_seed(1)
    model = LanguageModel(config, reasoning=reasoning).eval().requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor += 0.1 * torch.randn_like(tensor)
    assert compiled.serves(model)
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(27, (rows, length), generator=torch.Generator().manual_seed(2))


LATER: dict[str, Callable[[LanguageModel], None]] = {
    "experts of a token": lambda model: setattr(model.blocks[2].feed_forward.router, "top_k", 1),
    "chunk of an adapter": lambda model: setattr(next(iter(model.blocks[0].plastic.values())), "chunk", 3),
    "epsilon": lambda model: setattr(model.final_norm, "eps", 0.5),
    "negative eigenvalues": lambda model: setattr(
        model.blocks[0].mixer, "allow_neg_eigval", not model.blocks[0].mixer.allow_neg_eigval
    ),
    "transposed weight": lambda model: setattr(
        model.blocks[0].mixer.output.weight, "data", model.blocks[0].mixer.output.weight.data.t()
    ),
    "no bias": lambda model: setattr(model.final_norm, "bias", None),
    "a parametrization": lambda model: parametrize.register_parametrization(
        model.blocks[0].mixer.output, "weight", Doubled()
    ),
}


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("change", LATER)
def test_what_is_changed_later_counts(change: str) -> None:
    """After a change the compiled step gives the logits of the ordinary pass, which a hook without effect asks for.

    1e-4: a change moves some logit by 1e-3 or more; two orders of float32 sums differ by 1e-5.
    """
    model, ids = make(), random_ids(2, 7)
    before = prefill(model, ids).logits_BV
    LATER[change](model)
    after = prefill(model, ids).logits_BV
    model.blocks[0].mixer.register_forward_hook(lambda *_: None)
    expected = prefill(model, ids).logits_BV
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)


def test_a_hook_of_all_modules_is_called() -> None:
    model, ids = make(), random_ids(2, 3)
    before = prefill(model, ids).logits_BV
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        after = prefill(model, ids).logits_BV
    finally:
        handle.remove()
    assert model.final_norm in called
    torch.testing.assert_close(after, before, atol=1e-3, rtol=0)
