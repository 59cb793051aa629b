"""Plastic adapters in the model: nothing at first, causal, the same in any pieces, packed or not; their branches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.config.schema_reasoning import Controller, Memory, PlasticLora, Reasoning, Rl
from cdrmix.model.cache import (
    branch,
    concatenated,
    fast_weights,
    filled,
    flattened,
    plastic_only,
    select,
    unread,
    with_fast_weights,
)
from cdrmix.model.fast_weights import Adapter, FastWeightOptions, FastWeightSpan, PlasticState
from cdrmix.model.language_model import LanguageModel

CHUNK = 6
# Two float64 evaluations of one function in different orders, through at most 3 blocks and 8 chunks.
BOUND = 1e-10


def make(seed: int = 0, *, moved: bool = True, rope: bool = True, neg: bool = False, **lora: object) -> LanguageModel:
    """A float64 model with adapters on every projection, every parameter moved off its initial zeros."""
    config = Model(
        vocab_size=23,
        d_model=16,
        layers=3,
        attention_fraction=1 / 3,
        attention=Attention(heads=2, kv_heads=1, rope=rope),
        rwkv=Rwkv.model_validate(
            {"head_size": 16, "decay_rank": 3, "iclr_rank": 3, "value_rank": 2, "gate_rank": 4}
            | {"allow_neg_eigval": neg}
        ),
        feed_forward=FeedForward(hidden=8, experts=4),
    )
    plastic = {"rank": 3, "alpha": 0.5, "decay": 0.9, "rwkv7": ["receptance", "key", "value", "output"]} | lora
    reasoning = Reasoning(
        chunk=CHUNK,
        plastic_lora=PlasticLora.model_validate(plastic),
        controller=Controller(step_budget=8, max_branches=3),
        memory=Memory(dim=8, top_k=2, max_tokens=100),
        rl=Rl(horizon=32, latency_weight=0.01, stability_weight=0.1),
    )
    torch.manual_seed(seed)
    model = LanguageModel(config, reasoning=reasoning).double()
    if moved:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(seed))


VARIANTS = [{}, {"rule": "hebb", "gated": False}, {"rule": "oja", "key_width": 5, "decay": 1.0}, {"neg": True}]


def test_a_new_adapter_changes_nothing_and_nothing_else_is_drawn_differently() -> None:
    with_adapters = make(moved=False)
    torch.manual_seed(0)
    without = LanguageModel(with_adapters.config).double()
    own = dict(with_adapters.named_parameters())
    assert all(torch.equal(own[name], parameter) for name, parameter in without.named_parameters())
    tokens = ids(2, 20)
    assert torch.equal(with_adapters(tokens).hidden_BTD, without(tokens).hidden_BTD)
    assert {name.split(".")[3] for name in own if ".plastic." in name} == {
        *("query", "key", "value", "output", "receptance")
    }


@pytest.mark.gate
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_cannot_change_an_earlier_one_and_is_read_from_the_next_chunk_on(variant: dict) -> None:
    model, tokens = make(**variant), ids(2, 30)
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 23
    apart = (model(tokens).hidden_BTD - model(changed).hidden_BTD).abs().amax((0, 2))
    assert apart[:13].max() < BOUND
    assert apart[13] > 1e-6
    episodes = torch.arange(0, 61, CHUNK, dtype=torch.int32)  # mixers forget at every chunk, fast weights do not
    whole = torch.tensor([0, 30, 60], dtype=torch.int32)
    far = [
        model(row, cu_seqlens=episodes, fast_weights=FastWeightOptions(whole)).hidden_BTD for row in (tokens, changed)
    ]
    assert (far[0] - far[1]).abs().amax((0, 2))[18:].min() > 1e-9
    near = [model(row, cu_seqlens=episodes).hidden_BTD for row in (tokens, changed)]
    assert (near[0] - near[1]).abs().amax((0, 2))[18:].max() < BOUND


@pytest.mark.gate
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gradients", [False, True])  # without them a token has a form of its own
def test_streaming_in_any_pieces_equals_the_full_forward(variant: dict, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        _stream_in_pieces(variant)


def _stream_in_pieces(variant: dict) -> None:
    model, tokens = make(**variant), ids(2, 23)
    whole = model(tokens, return_cache=True)
    for ends in ([5, 6, 7, 23], [*range(1, 15), 23], [6, 12, 18, 23]):
        state, pieces = None, []
        for start, end in itertools.pairwise([0, *ends]):
            output = model(tokens[:, start:end], cache=state, return_cache=True)
            state = output.cache
            pieces.append(output.hidden_BTD)
        assert (torch.cat(pieces, 1) - whole.hidden_BTD).abs().max() < BOUND
        for one, two in zip(fast_weights(state), fast_weights(whole.cache), strict=True):
            assert (one - two).abs().max() < BOUND


@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 23),
    chunk=st.integers(1, 9),
    sizes=st.tuples(*[st.integers(1, 19)] * 4),
    rule=st.sampled_from(["delta", "hebb", "oja"]),
    gated=st.booleans(),
    gradients=st.booleans(),
    scales=st.sampled_from([None, [1.0], [0.5, 0.0]]),
)
def test_an_adapter_is_the_same_token_by_token(
    seed: int,
    rows: int,
    tokens: int,
    chunk: int,
    sizes: tuple[int, int, int, int],
    rule: str,
    gated: bool,
    gradients: bool,
    scales: list[float] | None,
) -> None:
    (inputs, outputs, rank, more), random = sizes, torch.Generator().manual_seed(seed)
    config = PlasticLora(rank=rank, key_width=rank + more, alpha=0.7, decay=0.9, rule=rule, gated=gated)
    adapter = Adapter(inputs, outputs, config, chunk).double()
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 4)
            if name == "values":  # values of a norm below 1, for which Oja's rule is stable
                parameter /= 10 * inputs * rank**0.5
    tokens = min(tokens, chunk) if scales else tokens  # branches are of one chunk
    x = torch.randn(rows, tokens, inputs, generator=random, dtype=torch.float64)
    weight = torch.randn(outputs, inputs, generator=random, dtype=torch.float64)
    span = FastWeightSpan(scale_S=None if scales is None else torch.tensor(scales))
    state, made = None, []
    with torch.set_grad_enabled(gradients):
        whole = adapter(x, weight, span, None)
        for number, token in enumerate(x.split(1, 1)):
            made.append(adapter(token, weight, span, state))
            state = PlasticState(made[-1].a, made[-1].pending, made[-1].last, (number + 1) % chunk)
    last = made[-1]
    for one, two in (
        (torch.cat([each.y for each in made], 1), whole.y),
        (last.a, whole.a),
        (last.pending, whole.pending),
        (last.last, whole.last),
    ):
        assert one.shape == two.shape
        # Sums of at most 38 products in another order, over 23 tokens that each keep at most what is there: 1,000
        # roundings of 1.1e-16, relative to the largest value.
        assert (one - two).abs().max() <= 1e-12 * two.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_documents_apart_where_they_begin_with_a_chunk(variant: dict) -> None:
    model, tokens = make(**variant), ids(2, 24)
    cu_seqlens = [0, 12, 24, 42, 48]
    packed = model(tokens, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32)).hidden_BTD
    flat = tokens.flatten()
    apart = [model(flat[start:end].unsqueeze(0)).hidden_BTD[0] for start, end in itertools.pairwise(cu_seqlens)]
    assert (packed.flatten(0, 1) - torch.cat(apart)).abs().max() < BOUND


def test_nothing_of_a_document_reaches_the_next_wherever_it_begins() -> None:
    model, tokens = make(), ids(1, 24)
    changed = tokens.clone()
    changed[:, :10] = (changed[:, :10] + 1) % 23
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    one, two = (model(row, cu_seqlens=cu_seqlens).hidden_BTD for row in (tokens, changed))
    assert (one[:, 10:] - two[:, 10:]).abs().max() < BOUND  # experts get other rows, so other sums


def test_fast_weights_alone_carry_over() -> None:
    model, tokens = make(), ids(2, 12)
    first = model(tokens[:, :6], return_cache=True).cache
    cu_seqlens, episodes = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 6, 12, 18, 24], [0, 12, 24]))
    row = model(tokens, cu_seqlens=cu_seqlens, fast_weights=FastWeightOptions(episodes)).hidden_BTD[:, 6:]
    second = model(tokens[:, 6:], cache=plastic_only(first))
    assert (second.hidden_BTD - row).abs().max() < BOUND
    none = model(tokens[:, 6:], cache=with_fast_weights(plastic_only(first), torch.zeros_like)).hidden_BTD
    assert (none - model(tokens[:, 6:]).hidden_BTD).abs().max() < BOUND
    assert (none - second.hidden_BTD).abs().max() > 1e-6


def test_rows_are_taken_and_joined_bit_for_bit() -> None:
    model, tokens = make(), ids(2, 12)
    state = model(tokens, return_cache=True).cache
    order = torch.tensor([1, 0])
    parts = [select(state, order[:1]), select(state, torch.tensor([True, False]))]
    whole, back = flattened(select(concatenated(*parts), order)), flattened(state)
    assert whole.keys() == back.keys()
    assert all(torch.equal(whole[name], back[name]) for name in back)
    begun = unread(state, 3)
    after = model(torch.cat([tokens, tokens[:1]]), cache=begun).hidden_BTD
    assert (after[:2] - model(tokens).hidden_BTD).abs().max() < BOUND


def test_a_state_goes_through_its_tensors_unchanged() -> None:
    model, tokens = make(attention=[]), ids(2, 12)
    state = model(tokens, return_cache=True).cache
    for kept in (state, plastic_only(state)):  # of the second the attention layer keeps nothing
        tensors = flattened(kept)
        again = filled(state, tensors)
        assert flattened(again).keys() == tensors.keys()
        assert torch.equal(model(tokens, cache=again).hidden_BTD, model(tokens, cache=kept).hidden_BTD)


def test_branches_of_writes_are_passes_of_their_own() -> None:
    model, tokens = make(decay=1.0), ids(2, 12)
    before = model(tokens[:, :6], return_cache=True).cache
    scales = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    output = model(tokens[:, 6:], cache=before, return_cache=True, fast_weights=FastWeightOptions(scale_S=scales))
    plain = model(tokens[:, 6:], cache=before, return_cache=True)
    assert torch.equal(output.hidden_BTD, plain.hidden_BTD)
    chosen = branch(output.cache, torch.tensor([0, 2]))
    for one, two, three in zip(*map(fast_weights, (chosen, plain.cache, before)), strict=True):
        assert (one[0] - two[0]).abs().max() < BOUND
        assert (one[1] - three[1]).abs().max() < BOUND  # nothing written, nothing decayed


def test_a_prefix_is_read_and_writes_nothing() -> None:
    model, tokens = make(), ids(2, 6)
    prefix = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output = model(tokens, prefix_BPD=prefix, return_cache=True)
    assert output.hidden_BTD.shape == (2, 6, 16)
    assert (output.hidden_BTD - model(tokens).hidden_BTD).abs().max() > 1e-6
    assert all(each.position == 0 for block in output.cache for each in block.plastic)
    _, embedded = model.embedding_norm(model.embedding(tokens))
    as_tokens = model(tokens[:, 3:], prefix_BPD=embedded[:, :3], return_cache=True)
    assert (as_tokens.hidden_BTD - model(tokens).hidden_BTD[:, 3:]).abs().max() < BOUND  # within a chunk none is read
    with pytest.raises(ValueError, match="one document a row"):
        model(tokens, prefix_BPD=prefix, cu_seqlens=torch.tensor([0, 6, 12]))


def test_slow_weights_learn_through_the_writes() -> None:
    model, tokens = make(correlation_weight=0.0).requires_grad_(True), ids(2, 18)
    output = model(tokens)
    assert not output.correlation.requires_grad
    output.hidden_BTD[:, 12:].square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".plastic." in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
    weighed = make(correlation_weight=0.5).requires_grad_(True)(tokens)
    assert weighed.correlation.requires_grad
    assert torch.equal(weighed.correlation, output.correlation)


def test_the_objective_of_the_writes_is_what_one_token_is_off_by() -> None:
    """With one token a chunk, its negative gradient in A is the delta rule's write."""
    model = make(decay=1.0, clamp=100.0)
    adapter = model.blocks[0].plastic["key"]
    adapter.chunk = 1
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    span = FastWeightSpan()
    weight = model.blocks[0].mixer.key.weight
    written = [adapter(x[:, :n], weight, span, None) for n in (8, 9)]
    a = written[0].a.clone().requires_grad_()
    adapter.config = adapter.config.model_copy(update={"correlation_weight": 1.0})
    state = PlasticState(a, a, written[0].last, 0)
    (gradient,) = torch.autograd.grad(adapter(x[:, 8:], weight, span, state).correlation, a)
    assert (written[0].a - gradient - written[1].a).abs().max() < BOUND


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_checkpointing_changes_no_gradient(checkpointing: bool) -> None:
    model, tokens = make(), ids(2, 15)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.activation_checkpointing = checkpointing
    model(tokens).hidden_BTD.square().sum().backward()
    found = model.blocks[1].plastic["key"].keys.grad.clone()
    plain = make()
    plain.requires_grad_(True)(tokens).hidden_BTD.square().sum().backward()
    assert torch.equal(found, plain.blocks[1].plastic["key"].keys.grad)


@pytest.mark.parametrize(("position", "tokens"), [(0, 3), (0, 13), (3, 2), (3, 9), (4, 1)])
def test_the_correlation_reads_each_token_with_the_state_of_its_chunk(position: int, tokens: int) -> None:
    """Token by token, for rows that begin and end inside of chunks of 5."""
    torch.manual_seed(0)
    lora = PlasticLora(rank=4, key_width=6, alpha=0.5, decay=0.9)
    adapter, chunks = Adapter(8, 8, lora, 5), -(-(position + tokens) // 5)
    k, v, beta = (torch.randn(2, tokens, *size, dtype=torch.float64) for size in ((6,), (4,), ()))
    reads_A = torch.randn(2, chunks, 4, 6, dtype=torch.float64)
    costs = [
        beta[:, t] * (v[:, t] - (reads_A[:, (position + t) // 5] @ k[:, t, :, None])[..., 0]).square().sum(-1) / 2
        for t in range(tokens)
    ]
    found = adapter._correlation(k, v, beta, reads_A, position)
    assert found.item() == pytest.approx(torch.stack(costs).mean().item(), rel=1e-12)
