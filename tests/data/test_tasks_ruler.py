"""RULER's tasks: exact counts of needles, hops, common and frequent words; published settings; lengths; scoring."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.tasks import TASKS, Example, Filler, make_example, score
from cdrmix.data.tasks.example import Value
from cdrmix.data.tasks.ruler import CommonWords, FrequentWords, Needles, Tracking, frequencies, zeta
from cdrmix.errors import ConfigError

NUMBER, NAME = r"\d{7}", r"[A-Z][a-z]{5}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# (keys, values of each, queries, haystack, key, value) of RULER's synthetic.yaml
PUBLISHED = {
    "single_1": (1, 1, 1, "passage", NAME, NUMBER),
    "single_2": (1, 1, 1, "text", NAME, NUMBER),
    "single_3": (1, 1, 1, "text", NAME, UUID),
    "multikey_1": (4, 1, 1, "text", NAME, NUMBER),
    "multikey_2": (1, 1, 1, "needles", NAME, NUMBER),
    "multikey_3": (1, 1, 1, "needles", UUID, UUID),
    "multivalue": (1, 4, 1, "text", NAME, NUMBER),
    "multiquery": (4, 1, 4, "text", NAME, NUMBER),
}


@pytest.mark.parametrize("variant", PUBLISHED)
@pytest.mark.parametrize("characters", [2000, 16_000])
def test_needles_are_as_many_as_published(variant: str, characters: int) -> None:
    keys, values, queries, haystack, key_form, value_form = PUBLISHED[variant]
    places = []
    for number in range(20):
        made = make_example(f"ruler_niah_{variant}", 1, number, characters)
        needles = re.findall(rf"The hidden (?:number|code) of ({key_form}) is ({value_form})\.", made.prompt)
        asked = set(re.findall(key_form, made.prompt.rpartition(" of ")[2].removesuffix("Answer:")))
        assert len(asked) == queries
        assert len(made.references) == queries * values
        by_key = Counter(key for key, _ in needles)
        assert all(by_key[key] == values for key in asked)
        if haystack == "needles":
            assert len(needles) == len(by_key) > characters / 120
        else:
            assert len(needles) == keys * values
            assert len(by_key) == keys
        lines = made.prompt.partition("\n")[2].rpartition("\nQuestion")[0]
        noise = [part for part in re.split(r"(?<=\.)\s", lines) if "hidden number of" not in part]
        noise = [part for part in noise if "hidden code of" not in part]
        if haystack == "passage":
            assert len(set(noise)) <= 5
            assert all(one == other for one, other in zip(noise, noise[5:], strict=False))
        if haystack == "text":
            assert len(set(noise)) > 0.9 * len(noise)
        places += [made.prompt.index(reference) / len(made.prompt) for reference in made.references]
        # the longest sentence of the filler has 50 characters, the longest needle 110
        assert characters - 110 <= len(made.prompt) <= characters + 110
    assert min(places) < 0.3 < 0.7 < max(places)


@given(
    number=st.integers(0, 10**9),
    keys=st.integers(1, 30),
    values=st.integers(1, 5),
    queries=st.integers(1, 30),
    haystack=st.sampled_from(["passage", "text", "needles"]),
    kinds=st.tuples(*[st.sampled_from(["numbers", "words", "uuids"])] * 2),
)
def test_any_number_of_needles(
    number: int, keys: int, values: int, queries: int, haystack: str, kinds: tuple[str, str]
) -> None:
    changes: dict[str, Value] = {
        "keys": keys,
        "values": values,
        "queries": queries,
        "haystack": haystack,
        "characters": 3000,
    }
    if queries > keys:
        with pytest.raises(ConfigError, match="ask for fewer"):
            Needles().changed(changes)
        return
    level = Needles().changed({**changes, "key_kind": kinds[0], "value_kind": kinds[1]})
    made = make_example("ruler_niah_multivalue", 1, number, level)
    needles: dict[str, list[str]] = {}
    for key, value in re.findall(r"The hidden \w+ of (\S+) is (\S+)\.(?=\s)", made.prompt):
        needles.setdefault(key, []).append(value)
    asked = re.split(r", | and ", made.prompt.rpartition(" of ")[2].removesuffix("?\nAnswer:"))
    assert len(asked) == queries
    assert list(made.references) == [value for key in asked for value in needles[key]]
    assert all(len(needles[key]) == values for key in asked)
    assert len(needles) == keys or haystack == "needles"
    assert made.answer == f" {', '.join(made.references)}"


@given(number=st.integers(0, 10**9), chains=st.integers(1, 8), hops=st.integers(1, 9))
def test_chains_are_whole_and_in_order(number: int, chains: int, hops: int) -> None:
    made = make_example("ruler_vt", 1, number, Tracking(characters=3000, chains=chains, hops=hops))
    lines = re.findall(r"Let ([A-Z]{5}) = (\w+)\.", made.prompt)
    assert len(lines) == len(dict(lines)) == chains * (hops + 1)
    assert sum(source.isdigit() for _, source in lines) == chains
    seen: dict[str, str] = {}
    for name, source in lines:
        seen[name] = source if source.isdigit() else seen[source]
    assert set(Counter(seen.values()).values()) == {hops + 1}
    assert len(made.references) == hops + 1
    standard = TASKS["ruler_vt"].standard
    assert (standard.chains, standard.hops) == (1, 4)


@given(
    number=st.integers(0, 10**9),
    words=st.integers(1, 12),
    times=st.integers(2, 40),
    other_times=st.integers(1, 39),
    characters=st.integers(1, 20_000),
)
def test_counts_of_common_words_are_exact(
    number: int, words: int, times: int, other_times: int, characters: int
) -> None:
    changes = {"characters": characters, "words": words, "times": times, "other_times": other_times}
    if other_times >= times:
        with pytest.raises(ConfigError, match="less often"):
            CommonWords().changed(changes)
        return
    made = make_example("ruler_cwe", 1, number, CommonWords().changed(changes))
    items = re.findall(r"(\d+)\. ([a-z]+)", made.prompt)
    assert [int(position) for position, _ in items] == list(range(1, len(items) + 1))
    counts = Counter(word for _, word in items)
    assert sorted(made.references) == sorted(word for word, count in counts.items() if count == times)
    others = {word: count for word, count in counts.items() if word not in made.references}
    assert len(made.references) == words
    assert set(others.values()) == {other_times}
    assert len(made.prompt) <= characters or len(others) == 1
    # another one, of six letters, a number and three marks, would not fit
    assert len(made.prompt) + other_times * 16 > characters


def test_published_counts_of_common_words() -> None:
    made = make_example("ruler_cwe", 1, 0, 16_000)
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", made.prompt)).values()
    assert Counter(counts)[30] == 10
    assert set(counts) == {30, 3}


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 3.5, 6.0])
def test_zeta(alpha: float) -> None:
    """Against the sum itself, whose rest lies between two integrals."""
    terms = 200_000
    head = math.fsum(rank**-alpha for rank in range(1, terms))
    assert head + terms ** (1 - alpha) / (alpha - 1) <= zeta(alpha) + 1e-9
    assert zeta(alpha) <= head + (terms - 1) ** (1 - alpha) / (alpha - 1) + 1e-9
    assert math.isclose(zeta(2), math.pi**2 / 6, rel_tol=1e-9)
    assert math.isclose(zeta(4), math.pi**4 / 90, rel_tol=1e-9)


@given(number=st.integers(0, 10**9), alpha=st.sampled_from([1.2, 1.5, 2.0, 2.5]), characters=st.integers(1, 30_000))
def test_counts_of_frequent_words_are_the_zeta_distribution(number: int, alpha: float, characters: int) -> None:
    made = make_example("ruler_fwe", 1, number, FrequentWords(characters=characters, alpha=alpha))
    words = made.prompt.split("\n")[1].split()
    counts = [count for _, count in Counter(words).most_common()]
    assert Counter(words).most_common(4)[0][0] == "..."
    assert [word for word, _ in Counter(words).most_common(4)[1:]] == list(made.references)
    assert counts[1] > counts[2] > counts[3] > (counts[4] if len(counts) > 4 else 0)
    # one total gives all the counts
    ranks = max(5, characters // 200)
    whole = sum(rank**-alpha for rank in range(1, 10_000)) + 9_999.5 ** (1 - alpha) / (alpha - 1)
    least, most = counts[0] * whole, (counts[0] + 1) * whole
    totals = range(math.floor(least), math.ceil(most) + 1)
    assert any([count for count in frequencies(total, alpha, ranks) if count] == counts for total in totals)
    assert len(made.prompt) <= characters or counts[3] == 1 or characters < 1000


def test_of_the_published_frequent_words() -> None:
    """alpha = 2: of a total N the ranks have N / zeta(2) / k^2, to be found from the words alone."""
    made = make_example("ruler_fwe", 1, 0, 20_000)
    counts = [count for _, count in Counter(made.prompt.split("\n")[1].split()).most_common()]
    total = counts[0] * math.pi**2 / 6
    for rank, count in enumerate(counts, 1):
        assert count <= total / (math.pi**2 / 6) / rank**2 + 1
        assert count >= total / (math.pi**2 / 6) / rank**2 - 1
    assert 19_000 < len(made.prompt) <= 20_000


def test_the_score_is_the_share_of_references_found() -> None:
    made = make_example("ruler_niah_multivalue", 1, 0)
    assert score(made, made.answer) == 1
    assert score(made, " and ".join(reversed(made.references))) == 1
    assert score(made, f"They are {made.references[2]} and {made.references[0]}.") == 0.5
    assert score(made, "") == 0
    upper = Example("?", "", " abc", ("abc", "DEF"))
    assert score(upper, "Def, ABC") == 1


@pytest.mark.parametrize("task", [task for task in TASKS.names() if task.startswith("ruler")])
def test_filler_of_a_corpus(task: str) -> None:
    """Where RULER hides things in text, the text is the corpus's, in its own order from a random place."""
    corpus = [f"Sentence {number} of the corpus is here." for number in range(500)]
    filler = Filler(["\n\n".join(corpus)])
    starts = set()
    for number in range(8):
        made = make_example(task, 1, number, 3000, filler=filler)
        assert made == make_example(task, 1, number, 3000, filler=filler)
        told = [int(number) for number in re.findall(r"Sentence (\d+) of the corpus is here\.", made.prompt)]
        if task.endswith(("single_1", "vt")):
            assert told[:5] == [(told[0] + more) % 500 for more in range(5)]
            assert set(told) == set(told[:5])
        elif "single" in task or "multivalue" in task or "multiquery" in task or "multikey_1" in task:
            assert told == [(told[0] + more) % 500 for more in range(len(told))]
            assert len(told) > 50
        else:
            assert told == []
        starts.update(told[:1])
    assert not starts or len(starts) > 4


def test_sentences_with_a_key_are_no_filler() -> None:
    """Else the text might say something of the key."""
    key = re.findall(r"number of (\w+) is", make_example("ruler_niah_single_2", 1, 0, 1000).prompt)[0]
    filler = Filler([f"Perhaps {key} was here. Some other sentence stands here."])
    made = make_example("ruler_niah_single_2", 1, 0, 1000, filler=filler)
    assert re.findall(r"number of (\w+) is", made.prompt) == [key]
    assert "Perhaps" not in made.prompt
    with pytest.raises(ValueError, match="give more text"):
        make_example("ruler_niah_single_2", 1, 0, 1000, filler=Filler([f"Perhaps {key} was here."]))
