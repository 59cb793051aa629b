"""Rows of unlike lengths in one batch: packed prompts leave the caches that each alone leaves, and go on as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import Bigrams
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.sampling import Sampling
from cdrmix.kernels.common.products import multiply_on_one_thread
from cdrmix.model import decoding
from cdrmix.model.cache import concatenated, flattened, select
from cdrmix.model.decoding import advance, prefill_rows, repeat, take
from cdrmix.model.language_model import Cache, LanguageModel

MakeModel = Callable[..., LanguageModel]
CONFIGS = Path(__file__).parents[2] / "configs"
BOUND = 1e-10  # two float64 evaluations of one function in different orders
LENGTHS = [5, 9, 1, 14, 2, 9]
KINDS = {
    "attention": {"attention_fraction": 1.0, "kv_heads": 1},
    "rwkv7": {"attention_fraction": 0.0},
    "channel_mix": {"attention_fraction": 0.5, "kind": "channel_mix"},
    "dense": {"attention_fraction": 0.5, "kind": "dense", "activation": "swiglu"},
    "mamba2": {"attention_fraction": 0.0, "mixer_layers": {"mamba2": [0, 1]}},
    "routing_mamba": {"attention_fraction": 0.0, "mixer_layers": {"routing_mamba": [0, 1]}},
    "bigrams": {"attention_fraction": 0.5, "bigrams": Bigrams(rows=61)},
    "hybrid": {"layers": 4, "attention_fraction": 0.25, "mixer_layers": {"mamba2": [1]}},
}


def model_of(make_model: MakeModel, kind: str, d_model: int = 16) -> LanguageModel:
    return make_model(**{"layers": 2, "d_model": d_model, **KINDS[kind]}).eval().requires_grad_(False)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 23, (length,), generator=generator).tolist() for length in lengths]


def packed(model: LanguageModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Cache]:
    bounds = torch.tensor([0, *accumulate(map(len, prompts))], dtype=torch.int32)
    ids_1T = torch.tensor([[token for ids in prompts for token in ids]])
    output = model(ids_1T, cu_seqlens=bounds, return_cache=True)
    assert output.cache is not None
    return output.hidden_BTD[0, bounds[1:].long() - 1], output.cache


def alone(model: LanguageModel, ids: list[int]) -> tuple[Tensor, Cache]:
    output = model(torch.tensor([ids]), return_cache=True)
    assert output.cache is not None
    return output.hidden_BTD[:, -1], output.cache


def continued(model: LanguageModel, cache: Cache, rows: int, steps: int = 4) -> Tensor:
    """Hidden states [rows, steps, D] of tokens that are read one by one behind a cache."""
    found = []
    for step in range(steps):
        output = model(torch.full((rows, 1), 5 * step + 1), cache=cache, return_cache=True)
        assert output.cache is not None
        cache = output.cache
        found.append(output.hidden_BTD)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_prompts_go_on_as_each_alone(make_model: MakeModel, kind: str) -> None:
    model, prompts = model_of(make_model, kind), prompts_of(LENGTHS)
    hidden, cache = packed(model, prompts)
    going_on = continued(model, cache, len(prompts))
    order = torch.tensor([4, 0, 0, 3])
    chosen = continued(model, select(cache, order), len(order))
    for number, ids in enumerate(prompts):
        hidden_1D, own = alone(model, ids)
        wanted = continued(model, own, 1)[0]
        assert (hidden[number] - hidden_1D[0]).abs().max() < BOUND
        assert (going_on[number] - wanted).abs().max() < BOUND
        for position in (order == number).nonzero():
            assert (chosen[position] - wanted).abs().max() < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_unlike_lengths_are_joined(make_model: MakeModel, kind: str) -> None:
    model, prompts = model_of(make_model, kind), prompts_of(LENGTHS)
    first, then = packed(model, prompts[:4])[1], [alone(model, ids)[1] for ids in prompts[4:]]
    whole = continued(model, packed(model, prompts)[1], len(prompts))
    assert (continued(model, concatenated(first, *then), len(prompts)) - whole).abs().max() < BOUND
    mask = torch.tensor([True, False, False, True, True, False])
    kept = continued(model, select(concatenated(first, *then), mask), 3)
    assert (kept - whole[mask]).abs().max() < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_of_packed_prompts_have_the_bits_of_each_alone(make_model: MakeModel, kind: str) -> None:
    """In float32 on a CPU, of 32 tokens and more: an expert's product of one to three rows rounds otherwise."""
    model = model_of(make_model, kind, d_model=64).float()
    prompts = prompts_of([40, 50, 64, 33])
    hidden, cache = packed(model, prompts)
    for number, ids in enumerate(prompts):
        hidden_1D, own = alone(model, ids)
        assert torch.equal(hidden[number], hidden_1D[0])
        found = [each.flatten() for each in flattened(select(cache, torch.tensor([number]))).values()]
        wanted = [each.flatten() for each in flattened(own).values()]
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_unlike_lengths_draw_what_each_alone_draws(
    make_model: MakeModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one batch, also where prompts are read in several passes and a long one in pieces."""
    model = model_of(make_model, kind).float()
    lengths = [*LENGTHS, 70]

    def drawn(rows: list[Row]) -> list[list[int]]:
        for _ in decode(model, rows):
            pass
        return [row.ids for row in rows]

    def rows() -> list[Row]:
        return [Row(ids, Sampling(seed=n, max_new_tokens=4 + n)) for n, ids in enumerate(prompts_of(lengths))]

    wanted = [drawn([row])[0] for row in rows()]
    monkeypatch.setattr(decoding, "SHORTEST_PIECE", 5)
    passes: list[tuple[int, int]] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **more: passes.append(tuple(ids.shape)) or forward(ids, **more))
    for at_once in (4096, 12, 6):
        passes.clear()
        monkeypatch.setattr(decoding, "PREFILL_TOKENS", at_once)
        assert drawn(rows()) == wanted, at_once
        assert max(tokens for _, tokens in passes) <= at_once
        assert sum(batch == len(lengths) for batch, _ in passes) == 3  # of the tokens that all rows draw, one pass each


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("name", ["core", "hybrid"])
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    """One token after a prompt, for 1 to 40 rows. A CPU multiplies by few rows with another order of summation."""
    if not multiply_on_one_thread():
        pytest.skip("this PyTorch has no MKL; the bits are measured with it")
    torch.manual_seed(1)
    model = LanguageModel(Config.from_yaml(CONFIGS / f"cdrmix-{name}-tiny.yaml", ["model.vocab_size=500"]).cdrmix_model)
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.normal_(std=0.1)  # many are 0 at first
    prefix = repeat(prefill_rows(model, prompts_of([9])), 40)
    tokens = torch.arange(40) % 8
    whole = advance(model, tokens, prefix.cache).logits_BV
    for rows in (1, 2, 3, 4, 5, 17):
        some = take(prefix, range(rows))
        assert torch.equal(advance(model, tokens[:rows], some.cache).logits_BV, whole[:rows]), rows


def test_what_packed_rows_cannot_give(make_model: MakeModel) -> None:
    model = model_of(make_model, "hybrid")
    with pytest.raises(ValueError, match="every document must have at least one token"):
        model(torch.tensor([[1, 2, 3]]), cu_seqlens=torch.tensor([0, 2, 2, 3]), return_cache=True)
