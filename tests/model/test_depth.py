"""Mixture-of-Depths: causal, the same streamed and packed, and equal to its definition in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_layers import Depth, FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.kernels.common.products import multiply_on_all_threads, multiply_on_one_thread
from cdrmix.model.cache import concatenated, select
from cdrmix.model.context import Context, make_context
from cdrmix.model.depth import DepthRouter, move_biases
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.skipping import mix_kept

# Two float64 evaluations of one function in different orders, through at most 5 blocks.
BOUND = 1e-10
HYBRID = {"layers": 5, "mixer_layers": {"mamba2": [0], "routing_mamba": [2]}}  # the others: rwkv7, attention, rwkv7
MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "shared": {"shared_hidden": 4, "activation": "swiglu"},
    "dense": {"kind": "dense"},
    "mixed": {"dense_layers": [0, 3], "dense_hidden": 12},
    "mixers": {"part": "mixer", "kind": "channel_mix"},
    "all": {"part": "both", **HYBRID},
}


def make_model(
    part: str = "feed_forward",
    *,
    bias: float = 0.0,
    layers: int = 4,
    mixer_layers: dict[str, list[int]] | None = None,
    checkpointing: bool = False,
    wide: bool = False,
    **feed_forward: Any,
) -> LanguageModel:
    """A float64 model whose branches skip about half of the tokens at bias 0. wide: of core-tiny's widths."""
    rank = 16 if wide else 3
    config = Model(
        vocab_size=23,
        d_model=128 if wide else 16,
        layers=layers,
        attention=Attention(heads=2, kv_heads=1),
        rwkv=Rwkv(head_size=32 if wide else 16, decay_rank=rank, iclr_rank=rank, value_rank=rank, gate_rank=rank),
        mamba=Mamba(d_state=64 if wide else 12, head_dim=32 if wide else 8, groups=2),
        mixer_layers=mixer_layers or {},
        feed_forward=FeedForward(**{"hidden": 64 if wide else 8, "experts": 8 if wide else 4, **feed_forward}),
        depth=Depth(part=part),  # type: ignore[arg-type]
    )
    torch.manual_seed(1)
    model = LanguageModel(config, activation_checkpointing=checkpointing).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for router in routers(model):
            router.bias.fill_(bias)
    return model


WIDE = MODELS | {"shared": {"shared_hidden": 32, "activation": "swiglu"}, "mixed": {"dense_layers": [0, 3]}}


@contextmanager
def one_thread() -> Iterator[None]:
    multiply_on_one_thread()
    try:
        yield
    finally:
        multiply_on_all_threads()


def routers(model: nn.Module) -> list[DepthRouter]:
    return [module for module in model.modules() if isinstance(module, DepthRouter)]


def ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(12))
@given(st.sampled_from(["moe", "shared", "dense", "mixed"]), st.integers(1, 24), st.integers(0, 10**6), st.data())
def test_a_changed_future_changes_no_bit_before_it(name: str, length: int, seed: int, data: st.DataObject) -> None:
    """In float32 without gradients, and of these widths, the bits of a product's row do not depend on the others."""
    model, tokens = make_model(wide=True, **WIDE[name]).float().eval(), ids(2, length, seed)
    place = data.draw(st.integers(0, length - 1))
    changed = tokens.clone()
    changed[:, place:] = (changed[:, place:] + 1) % 23
    with one_thread(), torch.no_grad():
        before, after = model(tokens).hidden_BTD, model(changed).hidden_BTD
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])


@settings(max_examples=examples(12))
@given(st.sampled_from(["mixers", "all"]), st.integers(1, 24), st.integers(0, 10**6), st.data())
def test_mixers_that_skip_are_causal(name: str, length: int, seed: int, data: st.DataObject) -> None:
    """To rounding: they multiply as many rows as are kept, and few rows are summed in another order."""
    model, tokens = make_model(**MODELS[name]), ids(2, length, seed)
    place = data.draw(st.integers(0, length - 1))
    changed = tokens.clone()
    changed[:, place:] = (changed[:, place:] + 1) % 23
    before, after = model(tokens).hidden_BTD, model(changed).hidden_BTD
    assert not place or (before[:, :place] - after[:, :place]).abs().max() < BOUND
    assert (before[:, place] - after[:, place]).abs().max() > 1e-6


@settings(max_examples=examples(12))
@given(st.sampled_from(sorted(MODELS)), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 99))
def test_pieces_with_a_cache_equal_one_pass(name: str, pieces: list[int], seed: int) -> None:
    model, tokens = make_model(**MODELS[name]), ids(2, sum(pieces), seed)
    cache, found = None, []
    for piece in tokens.split(pieces, 1):
        output = model(piece, cache=cache, return_cache=True)
        cache = output.cache
        found.append(output.hidden_BTD)
    assert (torch.cat(found, 1) - model(tokens).hidden_BTD).abs().max() < BOUND


@settings(max_examples=examples(12))
@given(st.sampled_from(sorted(MODELS)), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_packed_documents_equal_documents_apart(name: str, lengths: list[int], seed: int) -> None:
    model, tokens = make_model(**MODELS[name]), ids(1, sum(lengths), seed)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = model(tokens, cu_seqlens=bounds).hidden_BTD
    apart = torch.cat([model(document).hidden_BTD for document in tokens.split(lengths, 1)], 1)
    assert (packed - apart).abs().max() < BOUND


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_call_has_the_same_bits_and_so_has_recomputation(name: str) -> None:
    tokens, weights = ids(2, 12), torch.ones(2, 12, dtype=torch.float64)
    gradients, reports = [], []
    for checkpointing in (False, False, True):
        model = LossModel(make_model(checkpointing=checkpointing, **MODELS[name]))
        losses = model(tokens, tokens, weights, torch.tensor([0, 5, 12, 24]), 24.0)
        losses.total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        reports.append(losses.depth)
    for found, report in zip(gradients[1:], reports[1:], strict=True):
        assert all(torch.equal(left, right) for left, right in zip(gradients[0], found, strict=True))  # type: ignore[arg-type]
        assert all(torch.equal(left, right) for left, right in zip(reports[0], report, strict=True))
    assert all(gradient is not None and gradient.any() for gradient in gradients[0])
    names = model.language_model.config.skipping
    assert 0 < reports[0].kept_G.sum() < reports[0].tokens_G.sum() == len(names) * 24


def test_a_block_adds_the_weighted_output_of_kept_tokens() -> None:
    """Against the definition: s = w . x / sqrt(D), and sigmoid(s) f(x) where s + b > 0, with f a plain SwiGLU."""
    model = make_model(kind="dense", activation="swiglu", bias=0.1)
    block: Any = model.blocks[0]
    x = torch.randn(30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    router, ffn = block.depth_routers["feed_forward"], block.feed_forward
    gate = router.gate(x)
    y = ffn(x.unsqueeze(0), None, None, gate).y[0]
    score = x @ router.weight[0] / 4  # sqrt(D)
    f = functional.silu(x @ ffn.w_up[0, :, 0::2]) * (x @ ffn.w_up[0, :, 1::2]) @ ffn.w_down[0]
    keep = score + 0.1 > 0
    assert 5 < keep.sum() < 25
    assert torch.equal(gate.keep_T, keep)
    assert (y - torch.where(keep.unsqueeze(1), score.sigmoid().unsqueeze(1) * f, 0)).abs().max() < BOUND
    assert not y[~keep].any()


def test_experts_compute_no_row_of_a_skipped_token() -> None:
    model = make_model()
    block: Any = model.blocks[1]
    x = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate = block.depth_routers["feed_forward"].gate(x)
    fed = block.feed_forward(x.unsqueeze(0), Context(), None, gate)
    assert fed.routed.counts_E.sum() == 2 * gate.keep_T.sum() < 2 * 40
    kept = gate.keep_T.nonzero().squeeze(1)
    alone = block.feed_forward.router.route(x[kept])
    y = ops.moe_experts(x[kept], block.feed_forward.w_up, block.feed_forward.w_down, alone)
    assert (fed.y[0, kept] - gate.weight_T[kept].unsqueeze(1) * y).abs().max() < BOUND
    assert abs(fed.routed.load_balance - alone.load_balance) < BOUND
    assert abs(fed.routed.z_loss - alone.z_loss) < BOUND
    assert not fed.y[0, ~gate.keep_T].any()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_where_no_token_is_kept_the_branches_add_nothing(name: str) -> None:
    model, tokens = make_model(bias=-100.0, **MODELS[name]), ids(2, 9)
    before = model(tokens)
    assert not before.depth.kept_G.any()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _, layer, branch, *_ = [*name.split("."), "", ""]
            if branch in ("mixer", "feed_forward") and model.config.skips(int(layer), branch):  # type: ignore[arg-type]
                parameter.zero_()
    assert torch.equal(model(tokens).hidden_BTD, before.hidden_BTD)
    LossModel(model)(tokens, tokens, torch.ones(2, 9), None, 18.0).total.backward()  # nothing divides by 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_first_rwkv7_mixer_skips_nothing() -> None:
    config = make_model("both", **HYBRID).config
    assert config.skipping == ("0.mixer", "0", "1", "2.mixer", "2", "3.mixer", "3", "4.mixer", "4")


@pytest.mark.parametrize("layer", [0, 2, 3, 4])
def test_a_mixer_reads_the_kept_tokens_of_each_document_alone(layer: int) -> None:
    """mamba2, routing_mamba, attention and the second rwkv7; the third document keeps no token."""
    model = make_model("both", **HYBRID)
    block: Any = model.blocks[layer]
    x, v_first = torch.randn(2, 1, 14, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 5, 9, 11, 14], dtype=torch.int32)
    keep = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1]).bool()
    router = block.depth_routers["mixer"]
    gate = router.gate(x[0])._replace(keep_T=keep)
    context = Context(cu_seqlens=bounds, v_first=v_first if layer == 4 else None)
    mixed = mix_kept(block.mixer, model.config, x, context, None, gate)
    wanted = torch.zeros_like(x)
    for start, end in itertools.pairwise(bounds.tolist()):
        places = keep[start:end].nonzero().squeeze(1) + start
        if len(places):
            inside = make_context(
                model.config, 1, len(places), None, 0, x.device, attends=block.mixer.attends, dtype=torch.float64
            )
            inside = inside._replace(v_first=None if context.v_first is None else v_first[:, places])
            y = block.mixer(x[:, places], inside, None).y
            wanted[:, places] = (x[0, places] @ router.weight[0] / 4).sigmoid().unsqueeze(1) * y
    assert (mixed.y - wanted).abs().max() < BOUND
    assert not mixed.y[:, ~keep].any()


@settings(max_examples=examples(10))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([-0.6, 0.0, 100.0, -100.0]))
def test_packed_prompts_are_continued_like_one_pass(lengths: list[int], bias: float) -> None:
    """Also where nothing of some prompts is kept, or of all; and after rows were joined and chosen."""
    model, tokens = make_model("both", bias=bias, **HYBRID), ids(1, sum(lengths))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cache = model(tokens, cu_seqlens=bounds, return_cache=True).cache
    cache = select(concatenated(cache, cache), torch.arange(len(lengths), 2 * len(lengths)))
    after = ids(len(lengths), 3, seed=2)
    for step in range(3):
        output = model(after[:, step : step + 1], cache=cache, return_cache=True)
        cache = output.cache
    for row, prompt in enumerate(tokens.split(lengths, 1)):
        whole = model(torch.cat([prompt, after[row : row + 1]], 1)).hidden_BTD
        assert (output.hidden_BTD[row] - whole[0, -1:]).abs().max() < BOUND


@given(st.floats(0.1, 0.9), st.floats(0.01, 30), st.floats(-50, 50), st.integers(0, 99))
def test_the_bias_finds_the_capacity_of_scores_of_any_scale(
    capacity: float, scale: float, shift: float, seed: int
) -> None:
    """200 steps at rate 0.1 leave 0.9^200 of the first distance, which is at most 81 / 0.01 standard deviations; the
    share of 20,000 scores has a standard deviation of at most 0.0036."""
    router = DepthRouter(1, capacity).train()
    router.weight.data.fill_(scale)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        scores = torch.randn(1000, 1, generator=generator) + shift / scale
        gated = router.gate(scores).gated
        move_biases(router, gated.threshold.view(1), gated.lowest.view(1), 1.0, 0.1)
    scores = torch.randn(20_000, 1, generator=generator) + shift / scale
    assert abs(float(router.gate(scores).gated.kept) / 20_000 - capacity) < 0.02


def test_a_new_router_keeps_every_token_until_it_is_released() -> None:
    router = DepthRouter(4, 0.5).train()
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    assert router.gate(x).keep_T.all()
    assert torch.equal(router.gate(x).weight_T, torch.full((100,), 0.5))
    router.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    shares = []
    for released in (0.0, 0.5, 1.0):
        gated = router.gate(x).gated
        router.move(float(gated.threshold), float(gated.lowest), released, 1.0)
        shares.append(router.gate(x).keep_T.float().mean().item())
    assert shares[0] >= 0.99  # all but the lowest
    assert 0.99 > shares[1] > shares[2] == 0.5
