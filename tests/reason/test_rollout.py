"""Rollouts: equal to one pass over their tokens, sampled from the probabilities, each row independently."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.errors import NonFiniteLogitsError
from cdrmix.inference.sampling import inverse
from cdrmix.model.cache import flattened, select
from cdrmix.model.decoding import prefill, repeat
from cdrmix.model.language_model import LanguageModel
from cdrmix.ops import decode as decode_step
from cdrmix.reason.rl.rollout import decode, generate, micro_batches, taken

VOCABULARY = 24


def model_of(*, mamba: bool = False, routed: bool = False) -> LanguageModel:
    """RWKV-7 (or Mamba-2), then attention; initialised wider than in training, so that its output is not uniform."""
    torch.manual_seed(5)
    config = Model(
        vocab_size=VOCABULARY,
        d_model=32,
        layers=2,
        attention_fraction=0.5,
        mixer_layers={"mamba2": [0]} if mamba else {},
        attention=Attention(heads=2, kv_heads=1),
        rwkv=Rwkv(head_size=16, decay_rank=4, iclr_rank=4, value_rank=4, gate_rank=4),
        mamba=Mamba(d_state=16, head_dim=16),
        feed_forward=FeedForward(hidden=16, experts=4, top_k=2)
        if routed
        else FeedForward(kind="channel_mix", hidden=48),
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompts(rows: int, length: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mamba", [False, True], ids=["rwkv7", "mamba2"])
def test_log_probabilities_are_those_of_one_pass(mamba: bool) -> None:
    """Token by token and in one pass sums are taken in another order: float32, some hundred terms of size 1 a layer."""
    model, temperature = model_of(mamba=mamba), 0.7
    made = generate(model, prompts(3), 6, temperature=temperature, generator=seeded(), group=4)
    whole = prompts(3).repeat_interleave(4, 0)
    with torch.no_grad():
        logits = taken(model, whole, made.tokens_BN).logits_SNV / temperature
    expected = logits.log_softmax(-1).gather(-1, made.tokens_BN.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(made.log_probs_BN, expected, rtol=1e-4, atol=1e-4)
    assert made.log_probs_BN.exp().std() > 0.01, "a model with uniform output would pass with any prompt"


def test_greedy_takes_the_likeliest() -> None:
    model = model_of()
    made = generate(model, prompts(5), 6, temperature=0.0, generator=seeded())
    with torch.no_grad():
        logits = taken(model, prompts(5), made.tokens_BN).logits_SNV
    assert torch.equal(made.tokens_BN, logits.argmax(-1))


def test_routers_do_not_see_what_is_after_the_end_of_a_row() -> None:
    """Bar: float32, sums of the same terms in another order."""
    model, tokens = model_of(routed=True), prompts(2)[:1].repeat(2, 1)
    ended = torch.arange(tokens.shape[1]).expand(2, -1) < torch.tensor([[3], [3]])
    wanted, other = (taken(model, prompts(2), tokens[:, :n]) for n in (3, tokens.shape[1]))
    for filling in (1, 2):
        found = taken(model, prompts(2), torch.where(ended, tokens, filling), ended)
        torch.testing.assert_close(found.logits_SNV[:, :3], wanted.logits_SNV, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.balance, wanted.balance, rtol=1e-5, atol=0)
    assert (other.balance - wanted.balance).abs() > 1e-3 * wanted.balance


def test_the_end_closes_a_row() -> None:
    """A row's tokens up to its end equal those of a rollout without an end token; the mask is False after it."""
    model, end = model_of(), 5
    free = generate(model, prompts(40), 8, temperature=1.0, generator=seeded())
    ended = generate(model, prompts(40), 8, temperature=1.0, generator=seeded(), end=end)
    before = (free.tokens_BN == end).long().cumsum(1) - (free.tokens_BN == end).long()
    assert torch.equal(ended.mask_BN, before == 0)
    assert 0 < int((~ended.mask_BN).sum()) < ended.mask_BN.numel()
    assert torch.equal(ended.tokens_BN, torch.where(before == 0, free.tokens_BN, end))
    assert torch.equal(ended.log_probs_BN[~ended.mask_BN], torch.zeros(int((~ended.mask_BN).sum())))


def test_draws_are_as_often_as_the_model_says() -> None:
    model, rows = model_of(), 20_000
    prefix = repeat(prefill(model, prompts(1)), rows)
    drawn = decode(model, prefix, 1, temperature=1.3, generator=seeded()).tokens_BN.flatten()
    expected = (prefix.logits_BV[0] / 1.3).softmax(-1)
    found = torch.bincount(drawn, minlength=VOCABULARY) / rows
    deviation = (expected * (1 - expected) / rows).sqrt()
    assert ((found - expected).abs() < 4.5 * deviation + 1e-6).all()  # of 24 counts, one in 10^4 seeds


def test_what_has_no_probability_is_never_drawn() -> None:
    """Tokens of probability 0 at both ends of the vocabulary, and points as near to 0 and 1 as there are."""
    prefix = repeat(prefill(model_of(), prompts(1)), 2000)
    logits = torch.full_like(prefix.logits_BV, float("-inf"))
    logits[:, 7], logits[:, 11] = 0.0, -30.0
    drawn = decode(model_of(), prefix._replace(logits_BV=logits), 1, temperature=1.0, generator=seeded())
    assert set(drawn.tokens_BN.flatten().tolist()) <= {7, 11}


def test_a_row_draws_for_itself() -> None:
    """A row's random numbers do not depend on the other rows' contents, nor on where those end."""
    model = model_of()
    first = generate(model, prompts(6), 6, temperature=1.0, generator=seeded(), end=5)
    other = prompts(6)
    other[3:] = other[3:].flip(1)
    second = generate(model, other, 6, temperature=1.0, generator=seeded(), end=5)
    assert torch.equal(first.tokens_BN[:3], second.tokens_BN[:3])
    again = generate(model, prompts(6), 6, temperature=1.0, generator=seeded(), end=5)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    different = generate(model, prompts(6), 6, temperature=1.0, generator=seeded(4), end=5)
    assert not torch.equal(first.tokens_BN, different.tokens_BN)


def test_a_prefix_serves_many_and_stays_as_it_is() -> None:
    model = model_of()
    begun = prefill(model, prompts(2))
    copy = select(begun.cache, torch.arange(2))
    group = decode(model, repeat(begun, 3), 5, temperature=0.0, generator=seeded())
    assert torch.equal(group.tokens_BN[0::3], group.tokens_BN[2::3])
    more = prefill(model, prompts(2, 4), begun.cache)
    whole = prefill(model, torch.cat([prompts(2), prompts(2, 4)], 1))
    torch.testing.assert_close(more.logits_BV, whole.logits_BV, rtol=1e-4, atol=1e-4)
    now, before = flattened(begun.cache), flattened(copy)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in now)


def test_the_model_is_left_in_its_mode_and_without_gradients() -> None:
    model = model_of().train()
    made = generate(model, prompts(2), 3, temperature=1.0, generator=seeded())
    assert model.training
    assert not made.log_probs_BN.requires_grad


def test_logits_that_are_no_numbers_are_an_error() -> None:
    model = model_of()
    with torch.no_grad():
        model.embedding.weight[3] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        generate(model, torch.full((1, 3), 3), 2, temperature=1.0, generator=seeded())


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_micro_batches_divide_the_rows(count: int, processes: int) -> None:
    rows, mask = torch.arange(count), torch.ones(count, 2, dtype=torch.bool)
    cuts = [micro_batches([rows, mask], 2, rank, processes) for rank in range(processes)]
    assert len({len(cut) for cut in cuts}) == 1, "a process that is done earlier leaves the others waiting"
    counted = [n for cut in cuts for part in cut for n, on in zip(part[0].tolist(), part[1].any(1), strict=True) if on]
    assert sorted(counted) == list(range(count))
    assert all(1 <= len(part[0]) <= 2 for cut in cuts for part in cut)
    assert len(micro_batches([rows, mask], 2, least=6)) == 6


def test_a_point_takes_the_token_in_whose_part_of_the_sum_it_lies() -> None:
    """Points on the bounds of parts, the largest point below 1, and tokens of probability 0 at both ends."""
    probability = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    for factor in (1.0, 2.0**-20, 2.0**10):  # of the sum
        taken = inverse(
            factor * probability.expand(len(points), -1), torch.tensor(points, dtype=torch.float64)[:, None]
        )
        assert taken.flatten().tolist() == [1, 1, 3, 3, 4, 4]


@given(seed=st.integers(0, 999), tokens=st.integers(1, 300), sharpness=st.sampled_from([0.1, 3.0, 30.0]))
def test_points_take_what_exact_sums_do(seed: int, tokens: int, sharpness: float) -> None:
    """The exact sums are fractions. A probability is rounded down by less than 2^-52, so a sum by tokens times that."""
    random = torch.Generator().manual_seed(seed)
    probability = (sharpness * torch.randn(1, tokens, generator=random, dtype=torch.float64)).softmax(-1)
    point = torch.rand(1, 1, generator=random, dtype=torch.float64)
    (token,) = inverse(probability, point).flatten().tolist()
    parts = [Fraction(value) for value in probability.flatten().tolist()]
    wanted, slack = Fraction(point.item()) * sum(parts), Fraction(2 * tokens, 2**52)
    assert sum(parts[:token]) - slack <= wanted <= sum(parts[: token + 1]) + slack
    assert parts[token] > 0


def test_compiled_sampling_takes_the_same_tokens() -> None:
    """`decode.choose` of a CPU and the operations of PyTorch, which a GPU has, for the same points."""
    random = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(64, 100, generator=random)
    points = torch.rand(64, generator=random, dtype=torch.float64)
    chosen, _ = decode_step.choose(logits, 0.7, points)
    assert torch.equal(chosen, inverse((logits / 0.7).double().softmax(-1), points[:, None]).squeeze(1))
