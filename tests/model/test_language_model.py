"""The whole model: schedules, causality, packing, streaming, gradients, initial loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cdrmix.config.mixer_layers import attention_layers
from cdrmix.config.schema_layers import Bigrams
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel

MakeModel = Callable[..., LanguageModel]
VARIANTS = [
    {"schedule": "interleave-x"},
    {"schedule": "top-of-x", "layers": 4, "attention_fraction": 0.5, "kv_heads": 1},
    {"attention_fraction": 0.0, "kind": "channel_mix", "tie_embeddings": False},
    {"layers": 5, "mixer_layers": {"mamba2": [0], "routing_mamba": [2]}},
    {
        "layers": 3,
        "attention_fraction": 0.0,
        "kind": "channel_mix",
        "mixer_layers": {"mamba2": [0, 2], "routing_mamba": [1]},
    },
    {"attention_fraction": 1.0, "layers": 2, "qk_norm": True, "activation": "swiglu", "norm": "rmsnorm"},
    {"attention_fraction": 1.0, "layers": 2, "kind": "dense", "activation": "swiglu", "norm": "rmsnorm"},
    {"attention_fraction": 0.25, "kind": "dense", "activation": "relu2"},
    {"bigrams": Bigrams(rows=61), "mixer_layers": {"mamba2": [0]}},
]
# Two float64 evaluations of one function in different orders, through at most 4 blocks.
BOUND = 1e-10


def ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_schedules_have_the_count_and_places_of_the_design() -> None:
    for layers in (24, 36, 64, 96):
        top = attention_layers(layers, 0.25, "top-of-x")
        interleaved = attention_layers(layers, 0.25, "interleave-x")
        assert top == set(range(layers - layers // 4, layers))
        assert interleaved == {i for i in range(layers) if (i + 1) % 4 == 0}
        assert layers - 1 in interleaved
    assert len(attention_layers(26, 0.25, "top-of-x")) == 6  # floor
    assert attention_layers(4, 0.0, "interleave-x") == set()
    assert attention_layers(3, 1.0, "top-of-x") == attention_layers(3, 1.0, "interleave-x") == {0, 1, 2}
    assert attention_layers(6, 1 / 3, "interleave-x") == {2, 5}
    assert 9 in attention_layers(10, 0.7, "interleave-x")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_cannot_change_an_earlier_logit(make_model: MakeModel, variant: dict[str, object]) -> None:
    model, tokens = make_model(**variant), ids(2, 21)
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 23
    before, after = model.logits(model(tokens).hidden_BTD), model.logits(model(changed).hidden_BTD)
    assert (before[:, :13] - after[:, :13]).abs().max() < BOUND
    assert (before[:, 13] - after[:, 13]).abs().max() > 1e-6
    assert (before[:, 20] - after[:, 20]).abs().max() > 1e-9  # and the effect reaches the end


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_documents_apart(make_model: MakeModel, variant: dict[str, object]) -> None:
    model, tokens = make_model(**variant), ids(2, 24)
    cu_seqlens = [0, 5, 6, 24, 37, 48]
    packed = model.logits(model(tokens, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32)).hidden_BTD)
    flat = tokens.flatten()
    apart = torch.cat(
        [
            model.logits(model(flat[start:end].unsqueeze(0)).hidden_BTD)[0]
            for start, end in itertools.pairwise(cu_seqlens)
        ]
    )
    assert (packed.flatten(0, 1) - apart).abs().max() < BOUND


@pytest.mark.parametrize("variant", VARIANTS)
def test_streaming_equals_the_full_forward(make_model: MakeModel, variant: dict[str, object]) -> None:
    model, tokens = make_model(**variant), ids(2, 19)
    whole = model.logits(model(tokens).hidden_BTD)
    state, pieces = None, []
    for start, end in [(0, 7), (7, 8), (8, 9), (9, 15), (15, 19)]:
        output = model(tokens[:, start:end], cache=state, return_cache=True)
        state = output.cache
        pieces.append(model.logits(output.hidden_BTD))
    assert (torch.cat(pieces, 1) - whole).abs().max() < BOUND


def test_recurrent_state_does_not_grow_without_attention(make_model: MakeModel) -> None:
    model = make_model(attention_fraction=0.0, kind="channel_mix", mixer_layers={"mamba2": [1], "routing_mamba": [3]})

    def size(length: int) -> int:
        state = model(ids(1, length), return_cache=True).cache
        return sum(leaf.numel() for block in state for leaf in (*block.mixer, block.feed_forward_BD))

    assert size(3) == size(40)


def test_state_and_packing_together_are_refused(make_model: MakeModel) -> None:
    model = make_model()
    state = model(ids(1, 3), return_cache=True).cache
    with pytest.raises(ValueError, match="either cu_seqlens"):
        model(ids(1, 3), cache=state, cu_seqlens=torch.tensor([0, 3]))


def parameters_loss(model: LanguageModel, tokens: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Callable[..., Tensor]:
    loss_model = LossModel(model)
    names = [name for name, _ in loss_model.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        arguments = (tokens, tokens.roll(-1, 1), weights, cu_seqlens, float(weights.sum()), 1.0)
        output = torch.func.functional_call(loss_model, dict(zip(names, values, strict=True)), arguments)
        assert isinstance(output.total, Tensor)
        return output.total

    return loss


@pytest.mark.parametrize("mixer_layers", [{}, {"mamba2": [0], "routing_mamba": [1]}])
def test_the_whole_model_passes_gradcheck(make_model: MakeModel, mixer_layers: dict[str, list[int]]) -> None:
    """Every parameter of a hybrid of all mixers, packed, with the router losses: against central differences."""
    model = make_model(layers=2, attention_fraction=0.5, activation="swiglu", mixer_layers=mixer_layers)
    tokens, weights = ids(1, 9), torch.rand(1, 9, dtype=torch.float64)
    loss = parameters_loss(model, tokens, weights, torch.tensor([0, 4, 9]))
    values = [parameter.detach().clone().requires_grad_() for parameter in LossModel(model).parameters()]
    assert torch.autograd.gradcheck(loss, values, fast_mode=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_activation_checkpointing_changes_no_bit(make_model: MakeModel, variant: dict[str, object]) -> None:
    tokens, weights, cu_seqlens = ids(2, 12), torch.ones(2, 12, dtype=torch.float64), torch.tensor([0, 5, 12, 24])
    gradients = []
    for flag in (False, True):
        model = LossModel(make_model(**variant, activation_checkpointing=flag))
        model(tokens, tokens, weights, cu_seqlens, 24.0).total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_every_parameter_gets_a_gradient(make_model: MakeModel) -> None:
    model = LossModel(make_model(tie_embeddings=False, layers=5, mixer_layers={"mamba2": [0], "routing_mamba": [2]}))
    tokens = ids(2, 12)
    model(tokens, tokens, torch.ones(2, 12, dtype=torch.float64), None, 24.0).total.backward()
    missing = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert missing == []


def test_the_untrained_loss_is_that_of_a_uniform_guess(make_model: MakeModel) -> None:
    model = make_model()
    torch.manual_seed(0)
    fresh = LossModel(LanguageModel(model.config))
    tokens = ids(4, 32)
    losses = fresh(tokens, tokens.roll(-1, 1), torch.ones(4, 32), None, 128.0)
    # Logits have a standard deviation of 0.02 sqrt(16) = 0.08, which adds half its square to ln 23.
    assert abs(losses.next_token_sum.item() / 128 - math.log(23)) < 0.02
    assert abs(losses.load_balance.item() - 1) < 0.05


def test_micro_batches_add_up_to_the_global_batch(make_model: MakeModel) -> None:
    model = LossModel(make_model(kind="channel_mix"))
    tokens, weights = ids(4, 10), torch.rand(4, 10, dtype=torch.float64)
    count = float(weights.sum())
    whole = model(tokens, tokens, weights, None, count).total
    parts = [model(tokens[i : i + 2], tokens[i : i + 2], weights[i : i + 2], None, count, 0.5).total for i in (0, 2)]
    assert abs(whole - sum(parts)) < BOUND


def test_parameters_are_built_without_memory_on_the_meta_device(make_model: MakeModel) -> None:
    config = make_model().config
    with torch.device("meta"):
        model = LanguageModel(config)
    assert all(parameter.is_meta for parameter in model.parameters())
