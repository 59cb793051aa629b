"""Mamba-2 and Routing-Mamba: against transformers, against their definitions, packed, streamed, reported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix.config.names import BUILT_IN
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.model.context import Context, make_context
from cdrmix.model.feed_forward.router import balance_routers
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.layers import parameter_kinds
from cdrmix.model.loss import LossModel
from cdrmix.model.mixers import MIXERS
from cdrmix.model.mixers.mamba2 import Mamba2, MambaCache, Projected, causal_convolution
from cdrmix.model.mixers.routing_mamba import RoutingMamba

MakeModel = Callable[..., LanguageModel]
ALONE = Context()  # one document a row


def config(*, groups: int = 2, conv_width: int = 4, d_model: int = 24, **feed_forward: object) -> Model:
    return Model(
        vocab_size=30,
        d_model=d_model,
        layers=2,
        attention=Attention(heads=2, kv_heads=2),
        mixer_layers={"routing_mamba": [1]},
        rwkv=Rwkv(head_size=16, decay_rank=2, iclr_rank=2, value_rank=2, gate_rank=2),
        mamba=Mamba(d_state=16, head_dim=8, groups=groups, conv_width=conv_width),
        feed_forward=FeedForward.model_validate({"hidden": 8, "experts": 4, **feed_forward}),
    )


def moved(mixer: Mamba2) -> Mamba2:
    """The mixer with every parameter moved, so that all of them matter."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer


@pytest.fixture(params=["mamba2", "routing_mamba"])
def mixer(request: pytest.FixtureRequest) -> Mamba2:
    torch.manual_seed(0)
    made = MIXERS[request.param](config(), 1)
    assert isinstance(made, Mamba2)
    return moved(made).double()


class DoubleNorm(torch.nn.Module):
    """The gated norm of transformers, which works in float32 alone, in its input's dtype."""

    def __init__(self, theirs: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.size, self.eps = theirs.weight, theirs.group_size, theirs.variance_epsilon

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        groups = (y * functional.silu(gate)).unflatten(-1, (-1, self.size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


@pytest.mark.filterwarnings("ignore")  # of the kernels that transformers looks for
@pytest.mark.parametrize(("groups", "conv_width"), [(1, 4), (2, 4), (6, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_agrees_with_transformers(
    monkeypatch: pytest.MonkeyPatch, groups: int, conv_width: int, dtype: torch.dtype, bound: float
) -> None:
    """Our mixer equals its mixer in plain PyTorch: in one call, and in two calls split at every position."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    ours = moved(Mamba2(config(groups=groups, conv_width=conv_width), 0)).to(dtype)
    sizes = {"num_heads": 6, "head_dim": 8, "state_size": 16, "n_groups": groups, "conv_kernel": conv_width}
    theirs = Mamba2Mixer(
        Mamba2Config(hidden_size=24, expand=2, num_hidden_layers=1, chunk_size=8, layer_norm_epsilon=1e-5, **sizes), 0
    ).to(dtype)
    names = {"input.weight": "in_proj.weight", "output.weight": "out_proj.weight", "conv_bias": "conv1d.bias"}
    weights = {names.get(name, name): weight for name, weight in ours.state_dict().items()}
    weights["conv1d.weight"] = weights.pop("conv_weight_WC").mT.unsqueeze(1)
    weights["norm.weight"] = weights.pop("norm_weight")
    theirs.load_state_dict(weights)
    if dtype == torch.float64:  # which transformers rounds to float32 on the way
        theirs.eval().norm = DoubleNorm(theirs.norm)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    x = torch.randn(2, 21, 24, dtype=dtype)
    with torch.no_grad():
        expected = theirs(x)
        assert expected.dtype == dtype
        assert expected.abs().max() > 1
        assert (ours(x, ALONE, None).y - expected).abs().max() < bound
        for position in range(1, 21):
            first = ours(x[:, :position], ALONE, None)
            second = ours(x[:, position:], ALONE, first.cache)
            assert (torch.cat([first.y, second.y], 1) - expected).abs().max() < bound, position


def token_by_token(mixer: Mamba2, projected: Projected) -> Tensor:
    """What the mixer makes of one document's projections, [T, I] before `emit`, from the formulas alone."""
    gate, x_B_C, step = (side[0] for side in (projected.gate, projected.x_B_C, projected.step))
    width, inner, size = len(mixer.conv_weight_WC), mixer.inner, mixer.groups * mixer.d_state
    state = torch.zeros(mixer.heads, mixer.head_dim, mixer.d_state, dtype=torch.float64)
    tokens = []
    for t in range(len(gate)):
        seen = [(i, t - width + 1 + i) for i in range(width) if t - width + 1 + i >= 0]
        convolved = mixer.conv_bias + sum(mixer.conv_weight_WC[i] * x_B_C[s] for i, s in seen)
        x, B, C = functional.silu(convolved).split([inner, size, size])
        y = torch.zeros(mixer.heads, mixer.head_dim, dtype=torch.float64)
        for head in range(mixer.heads):
            group = head // (mixer.heads // mixer.groups)
            part = slice(group * mixer.d_state, (group + 1) * mixer.d_state)
            x_head = x[head * mixer.head_dim : (head + 1) * mixer.head_dim]
            dt = torch.log1p(torch.exp(step[t, head] + mixer.dt_bias[head]))
            decayed = torch.exp(-torch.exp(mixer.A_log[head]) * dt) * state[head]
            state = state.index_put((torch.tensor(head),), decayed + dt * torch.outer(x_head, B[part]))
            y[head] = state[head] @ C[part] + mixer.D[head] * x_head
        gated = (y.flatten() * functional.silu(gate[t])).view(mixer.groups, -1)
        mean_square = gated.square().mean(-1, keepdim=True)
        tokens.append((gated / (mean_square + mixer.norm_eps).sqrt()).flatten() * mixer.norm_weight)
    return torch.stack(tokens)


def test_equals_its_definition(mixer: Mamba2) -> None:
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        projected = mixer.project(x)
        expected = mixer.emit(token_by_token(mixer, projected).unsqueeze(0), projected.routing)
        found = mixer(x, ALONE, None).y
    assert expected.abs().max() > 0.1
    # Sums of at most 48 terms of order 1, through six operations in a row: 2^-53 * 48 * 6 = 3e-14.
    assert (found - expected).abs().max() < 1e-13


def test_experts_equal_a_dense_loop() -> None:
    """Projections as sums over all experts, with a weight of zero for those that were not chosen; and gradients."""
    torch.manual_seed(0)
    mixer = moved(RoutingMamba(config(top_k=3), 1)).double()
    assert isinstance(mixer, RoutingMamba)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    inside = torch.randn(2, 7, mixer.inner, dtype=torch.float64)
    found = mixer.project(x)
    logits = x @ mixer.router.weight.mT
    chosen = logits >= logits.topk(3, -1).values[..., -1:]
    weights = torch.where(chosen, logits, -math.inf).softmax(-1)

    def dense(x: Tensor, w: Tensor) -> Tensor:
        return sum(weights[..., e, None] * (x @ w[e]) for e in range(4))  # type: ignore[return-value]

    gate, x_inner = dense(x, mixer.w_up).chunk(2, -1)
    expected = [gate, x_inner, *mixer.select(x).split([64, 6], -1), dense(inside, mixer.w_down)]
    results = [found.gate, *found.x_B_C.split([48, 64], -1), found.step, mixer.emit(inside, found.routing)]
    parameters = [mixer.w_up, mixer.w_down, mixer.router.weight, mixer.select.weight]
    gradients = []
    for tensors in (results, expected):
        loss = sum((tensor * torch.linspace(-1, 1, tensor.shape[-1])).sum() for tensor in tensors)
        gradients.append(torch.autograd.grad(loss, parameters))  # type: ignore[arg-type]
    for one, other in zip([*results, *gradients[0]], [*expected, *gradients[1]], strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_single_tokens_equal_the_whole(mixer: Mamba2) -> None:
    """With the step of generation, and with the scan that training uses; from the state of a prompt."""
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    whole = mixer(x, ALONE, None)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            state, tokens = None, []
            for t in range(9):
                output = mixer(x[:, t : t + 1], ALONE, state)
                state = output.cache
                tokens.append(output.y)
        assert (torch.cat(tokens, 1) - whole.y).abs().max() < 1e-13
        assert isinstance(state, MambaCache)
        for one, other in zip(state, whole.cache, strict=True):
            assert (one - other).abs().max() < 1e-13
            assert one.is_contiguous()  # not a view that keeps the whole prompt


DOCUMENTS = [0, 5, 6, 8, 24, 37, 38, 39, 48]


def context(cu_seqlens: list[int]) -> Context:
    return make_context(config(), 2, 24, torch.tensor(cu_seqlens), 0, torch.device("cpu"), attends=False)


@given(st.sets(st.integers(1, 23), max_size=12), st.integers(1, 5), st.integers(2, 5))
def test_the_convolution_of_packed_documents_has_the_bits_of_each_alone(
    starts: set[int], channels: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((1, 24, channels), (width, channels), (channels,)))
    bounds = [0, *sorted(starts), 24]
    cu_seqlens = torch.tensor(bounds)
    before = make_context(config(), 1, 24, cu_seqlens, 0, x.device, attends=False).before_BT1
    packed, last = causal_convolution(x, weight, bias, None, before)
    for low, high in itertools.pairwise(bounds):
        assert torch.equal(packed[:, low:high], causal_convolution(x[:, low:high], weight, bias, None, None)[0])
    assert torch.equal(last, torch.cat([torch.zeros(1, width - 1, channels), x], 1)[:, -width + 1 :])


def test_packed_documents_have_the_bits_of_each_alone(mixer: Mamba2, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, between the projections: a matrix product rounds by how many rows it has, documents or not."""
    mixer.float()
    sizes = [mixer.inner, mixer.channels, mixer.heads]
    monkeypatch.setattr(mixer, "project", lambda x, sequence: Projected(*x.split(sizes, -1)))
    monkeypatch.setattr(mixer, "emit", lambda y, routing: y)
    x = torch.randn(2, 24, sum(sizes))
    with torch.no_grad():
        packed = mixer(x, context(DOCUMENTS), None).y.flatten(0, 1)
        for low, high in itertools.pairwise(DOCUMENTS):
            alone = mixer(x.flatten(0, 1)[low:high].unsqueeze(0), ALONE, None).y
            assert torch.equal(packed[low:high], alone[0]), (low, high)


def test_a_document_does_not_touch_the_others(mixer: Mamba2) -> None:
    x = torch.randn(2, 24, 24, dtype=torch.float64)
    changed = x.clone()
    changed[0, 8:24] = 100.0
    with torch.no_grad():
        one, other = (mixer(each, context(DOCUMENTS), None).y for each in (x, changed))
    # Experts' products round by how many rows they have, which the other document has changed: 2^-53 * 48 * 6 again.
    bound = 1e-13 if isinstance(mixer, RoutingMamba) else 0
    assert (one - other)[0, :8].abs().max() <= bound
    assert (one - other)[1].abs().max() <= bound
    assert (one - other)[0, 8:].abs().max() > 0.1


def test_begins_as_published() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(config(d_model=512), 0)
    rate, step = mixer.A_log.exp(), functional.softplus(mixer.dt_bias)
    assert 1 <= rate.min() < 2.5 < 14.5 < rate.max() <= 16
    assert 1e-3 <= step.min() < 3e-3 < 3e-2 < step.max() <= 0.1 + 1e-6
    assert torch.equal(mixer.D, torch.ones(128))
    assert mixer.input.weight.abs().max() <= 512**-0.5
    assert not mixer.output.weight.any()


def test_parameter_kinds(make_model: MakeModel) -> None:
    model = make_model(mixer_layers={"mamba2": [0], "routing_mamba": [1]})
    kinds = parameter_kinds(model)
    for name in ("0.mixer.input.weight", "0.mixer.output.weight", "1.mixer.select.weight"):
        assert kinds[f"blocks.{name}"] == "projection", name
    assert kinds["blocks.1.mixer.w_up"] == kinds["blocks.1.mixer.w_down"] == "expert"
    for leaf in ("A_log", "D", "dt_bias", "norm_weight"):
        assert kinds[f"blocks.0.mixer.{leaf}"] == kinds[f"blocks.1.mixer.{leaf}"] == "vector", leaf
    for leaf in ("conv_weight_WC", "conv_bias"):
        assert kinds[f"blocks.0.mixer.{leaf}"] == kinds[f"blocks.1.mixer.{leaf}"] == "convolution", leaf
    assert kinds["blocks.1.mixer.router.weight"] == "router"


def test_every_mixer_that_a_configuration_may_name_is_there() -> None:
    assert MIXERS.names() == sorted(BUILT_IN["mixer"])
    with pytest.raises(ValueError, match=r"unknown mixer 'mamba'.*Did you mean 'mamba2'"):
        MIXERS["mamba"]


def routers(model: LanguageModel) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from ((name, module) for name, module in model.named_modules() if name.endswith(".router"))


def test_a_block_with_two_routers_reports_both_and_balances_both(make_model: MakeModel) -> None:
    model = make_model(mixer_layers={"routing_mamba": [1, 3]}, bias_update_rate=0.1)
    names = [f"blocks.{layer}.router" for layer in ("0.feed_forward", "1.mixer", "1.feed_forward", "2.feed_forward")]
    names += ["blocks.3.mixer.router", "blocks.3.feed_forward.router"]
    assert [name for name, _ in routers(model)] == names
    ids = torch.arange(40).view(2, 20) % 23
    report = model(ids).router
    assert report is not None
    assert report.tokens_per_expert_LE.shape == (6, 4)
    assert (report.tokens_per_expert_LE.sum(1) == 2 * 40).all()
    balance_routers(model, report.tokens_per_expert_LE, 0.1)
    moved_by = torch.stack([module.bias for _, module in routers(model)])  # type: ignore[misc]
    signs = (report.tokens_per_expert_LE.double().mean(1, keepdim=True) - report.tokens_per_expert_LE).sign()
    assert torch.equal(moved_by.sign(), (signs - signs.mean(1, keepdim=True)).sign())


def test_without_a_mixture_of_experts_the_mixers_router_is_trained_alone(make_model: MakeModel) -> None:
    model = LossModel(make_model(kind="channel_mix", mixer_layers={"routing_mamba": [2]}))
    ids = torch.arange(24).view(2, 12) % 23
    losses = model(ids, ids, torch.ones(2, 12, dtype=torch.float64), None, 24.0)
    assert losses.router is not None
    assert losses.router.tokens_per_expert_LE.shape == (1, 4)
    assert losses.load_balance > 0
    losses.total.backward()
    assert model.language_model.blocks[2].mixer.router.weight.grad.any()  # type: ignore[union-attr, operator]


def test_dropped_routes_add_nothing() -> None:
    """A token whose routes are all dropped has no gate and no input of its own: its output is zero."""
    torch.manual_seed(0)
    mixer = moved(RoutingMamba(config(drop=True, capacity_factor=0.5, top_k=1), 1)).double()
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    with torch.no_grad():
        report = mixer(x, ALONE, None)
        routing = mixer.project(x).routing
        assert report.routed is not None
        assert routing is not None
        dropped = routing.order_R[int(routing.counts_E.sum()) :]
        assert 0 < len(dropped) < 12
        assert not report.y[0, dropped].any()
        assert report.y[0].any(-1).sum() == 12 - len(dropped)
