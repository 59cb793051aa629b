"""Speculative decoding: the tokens of plain decoding for every mixer and kind, and the states after every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cdrmix.config.schema_layers import Bigrams
from cdrmix.config.schema_prediction import Prediction
from cdrmix.errors import ConfigError
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.sampling import Sampling
from cdrmix.inference.speculative import Drafter, DraftStatistics, decode_speculatively
from cdrmix.kernels.common.products import multiplies_on_one_thread, multiply_on_all_threads, multiply_on_one_thread
from cdrmix.model.cache import flattened
from cdrmix.model.language_model import LanguageModel

MakeModel = Callable[..., LanguageModel]
MIXERS = {"mamba2": [0], "routing_mamba": [3]}  # of 4 layers; the others are rwkv7 and attention
DRAFTING = [("maps", "attention"), ("heads", "attention"), ("chain", "attention")]
DRAFTING += [("sequential", mixer) for mixer in ("attention", "rwkv7", "mamba2")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The settings under which the bits of a row do not depend on the number of rows."""
    before = multiplies_on_one_thread()
    multiply_on_one_thread()
    yield
    if not before:
        multiply_on_all_threads()


def hybrid(make_model: MakeModel, depths: str, mixer: str = "attention", **more: object) -> LanguageModel:
    section = Prediction(tokens=4, kind=depths, mixer=mixer)  # type: ignore[arg-type]
    return make_model(**{"prediction": section, "mixer_layers": MIXERS, **more}).eval().requires_grad_(False)


@pytest.mark.parametrize("feed_forward", ["moe", "channel_mix"])
@pytest.mark.parametrize("bigrams", [None, Bigrams(rows=61)], ids=["", "bigrams"])
def test_one_pass_has_the_bits_of_single_tokens_and_keeps_every_state(
    make_model: MakeModel, feed_forward: str, bigrams: Bigrams | None
) -> None:
    # Of up to 4 tokens: products of up to 5 rows have the same bits for each row (measured). Without routing_mamba:
    # its experts' products round otherwise for one row than for several.
    more = {"kind": feed_forward, "d_model": 32, "mixer_layers": {"mamba2": [0]}, "bigrams": bigrams}
    model = hybrid(make_model, "chain", **more).float()
    ids = torch.randint(23, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = model(ids[:, :12], return_cache=True).cache
        together = model(ids[:, 12:], cache=cache, token_by_token=True)
        assert together.caches is not None
        for place in range(4):
            alone = model(ids[:, 12 + place : 13 + place], cache=cache, return_cache=True)
            cache = alone.cache
            assert torch.equal(alone.hidden_BTD[:, 0], together.hidden_BTD[:, place])
            assert cache is not None
            found = flattened(together.caches[place])
            for name, tensor in flattened(cache).items():
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("kind", "mixer"), DRAFTING)
def test_the_tokens_are_those_of_plain_decoding(make_model: MakeModel, kind: str, mixer: str) -> None:
    # In float64, where kernels that round otherwise for several rows differ by 1e-16 of a logit.
    model, first = hybrid(make_model, kind, mixer), DRAFTING.index((kind, mixer)) % 2

    def rows() -> list[Row]:
        """Every other row takes the most probable token: those of even numbers of every other kind of drafts."""
        temperatures = [float((number + first) % 2) for number in range(4)]
        sampled = [
            Sampling(temperature=temperature, seed=n, max_new_tokens=12 + n, top_k=4)
            for n, temperature in enumerate(temperatures[:3])
        ]
        sampled.append(
            Sampling(temperature=temperatures[3], seed=9, max_new_tokens=16, repetition_penalty=1.3, top_p=0.9)
        )
        return [Row([n, *range(n * n)], sampling, first=[3, 5] if n == 2 else []) for n, sampling in enumerate(sampled)]

    plain, drafted, statistics = rows(), rows(), DraftStatistics()
    for number, token in decode(model, plain, 20):
        plain[number].ended = token == 7 and plain[number].drawn > 6
    for number, token in decode_speculatively(model, drafted, 20, statistics):
        drafted[number].ended = token == 7 and drafted[number].drawn > 6
    assert [row.ids for row in drafted] == [row.ids for row in plain]
    assert statistics.tokens == sum(row.drawn for row in plain)
    # A pass gives a token besides the accepted drafts, but for a row whose last token is an accepted draft.
    assert statistics.passes - len(plain) <= statistics.tokens - statistics.accepted <= statistics.passes
    assert statistics.drafted <= 3 * statistics.passes


class Oracle(Drafter):
    """Drafts the tokens of a text, each but every third of which is right."""

    text: list[int]

    def draft(self, hidden_1TD: torch.Tensor, ids: object) -> list[int]:
        start = len(ids)  # type: ignore[arg-type]
        return [
            token if place % 3 else (token + 1) % 20 for place, token in enumerate(self.text[start : start + 3], start)
        ]


def test_accepted_and_refused_drafts_leave_the_states_of_plain_decoding(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrid(make_model, "chain")
    row = Row([1, 2, 3], Sampling(temperature=0.9, max_new_tokens=40))
    for _ in decode(model, [row], 20):
        pass
    Oracle.text = row.ids
    monkeypatch.setattr("cdrmix.inference.speculative.Drafter", Oracle)
    again, statistics = Row([1, 2, 3], row.sampling), DraftStatistics()
    for _ in decode_speculatively(model, [again], 20, statistics):
        pass
    assert again.ids == row.ids
    assert 0.3 < statistics.acceptance < 0.9
    assert statistics.tokens_per_pass > 1.5
    assert str(statistics).startswith(f"40 tokens in {statistics.passes} passes")


def test_drafts_of_blocks_do_not_depend_on_how_tokens_were_read(make_model: MakeModel) -> None:
    """The caches of sequential depths after accepted and refused drafts give the drafts of a fresh drafter."""
    model = hybrid(make_model, "sequential", "rwkv7")
    ids = torch.randint(23, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).hidden_BTD
        drafter, read = Drafter(model, 23), 0
        for end in (1, 2, 5, 6, 9, 13, 14, 29):  # tokens read; one more is drawn
            found = drafter.draft(hidden[:, read:end], ids[: end + 1])
            assert found == Drafter(model, 23).draft(hidden[:, :end], ids[: end + 1])
            read = end


def test_what_cannot_draft_is_refused(make_model: MakeModel) -> None:
    row = Row([1], Sampling())
    for model in (make_model(), hybrid(make_model, "shared")):
        with pytest.raises(ConfigError, match=r"model\.prediction"):
            decode_speculatively(model, [row], None, DraftStatistics())
    model = make_model()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with torch.no_grad():
        cache = model(ids, return_cache=True).cache
        for arguments in ({"cache": cache}, {}):
            with pytest.raises(ValueError, match="token_by_token needs one row"):
                model(ids, token_by_token=True, **arguments)
