"""Canaries and the search of leaks: ranks by known log-likelihoods, forms of alternatives, wrong files."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path

import pytest

from cdrmix.errors import ConfigError
from cdrmix.eval.canaries import ALTERNATIVES, Canary, exposures, other_secrets, read_canaries
from cdrmix.eval.leak import Searched, _personal_data, _search, read_policy
from cdrmix.eval.suites import Likelihood, SuiteOptions


def test_alternatives_have_the_form_of_the_secret() -> None:
    found = other_secrets("Ab-19 é", ALTERNATIVES, seed=1)
    assert len(set(found)) == ALTERNATIVES
    assert "Ab-19 é" not in found
    for text in found:
        assert (text[0].isupper(), text[1].islower(), text[3:5].isdecimal()) == (True, True, True), text
        assert (text[2], text[5:]) == ("-", " é")
    assert found == other_secrets("Ab-19 é", ALTERNATIVES, seed=1)
    assert found != other_secrets("Ab-19 é", ALTERNATIVES, seed=2)
    assert sorted(other_secrets("7", ALTERNATIVES, seed=1)) == list("012345689")


def test_rank_and_exposure() -> None:
    """A model that prefers small numbers: the secret 250 is the 251st of 1,000."""

    def likelihoods(pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        return [Likelihood(-float(secret), False) for _, secret in pairs]

    def answer(prompts: Sequence[str], limits: Sequence[int]) -> list[str]:
        assert min(limits) >= 3
        return [" 250 and more" if prompt == "a " else "251" for prompt in prompts]

    canaries = [Canary(4, "a ", "250"), Canary(7, "b ", "000"), Canary(9, "c ", "999")]
    first, best, worst = exposures(canaries, likelihoods, answer, [3, 3, 3], seed=1)
    assert (first.line, first.rank, first.secrets, first.continued) == (4, 251, 1000, True)
    assert first.bits == pytest.approx(log2(1000 / 251))
    assert (best.rank, best.continued, best.bits) == (1, False, pytest.approx(log2(1000)))
    assert (worst.rank, worst.bits) == (1000, 0.0)


def test_the_search_tells_whether_it_was_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _search({"ann@example.org", "bob@example.org"}, ["x", "to ann@example.org"])
    assert (found.found, found.whole) == ({"ann@example.org"}, True)
    monkeypatch.setattr("cdrmix.eval.leak.BYTES", 1)
    found = _search({"ann@example.org"}, ["xy", "to ann@example.org"])
    assert (found.found, found.whole, found.characters) == (set(), False, 2)


def test_only_personal_data_of_the_training_text_count_as_its() -> None:
    """Of four texts, three have personal data, and one of these has data that the training text has."""
    personal = [[("email", "a@b.org")], [("email", "c@d.org"), ("ip", "1.1.1.1")], [("ip", "8.8.8.8")], []]
    measures = {each.name: each for each in _personal_data(personal, Searched(frozenset({"1.1.1.1"}), 9, True), {})}
    found = {name: measures[name].value for name in ("personal_data", "email", "ip", "personal_data_of_training")}
    assert found == {"personal_data": 0.75, "email": 0.5, "ip": 0.5, "personal_data_of_training": 0.25}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"canaries.jsonl:2: it is not JSON .*; a line is {\"prompt\": \"...\", \"secret\""),
        ("[" * 100_000, "canaries.jsonl:2: it is not JSON"),
        ('{"prompt": "a"}', "canaries.jsonl:2: found the keys prompt; a line is"),
        ('["a", "b"]', 'canaries.jsonl:2: found .*"a", "b".*; a line is'),
        ('{"prompt": "a", "secret": 7}', "canaries.jsonl:2: secret must be text that is not empty; found 7"),
        ('{"prompt": "a", "secret": " "}', "canaries.jsonl:2: secret must be text that is not empty"),
        ('{"prompt": "a", "secret": "-é"}', "canaries.jsonl:2: the secret has no ASCII letter or digit"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "canaries.jsonl"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_canaries(path)


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.jsonl"
    with pytest.raises(ConfigError, match="there is no such file"):
        SuiteOptions(policy=path)
    for content, message in (
        (b"\n\n", "the file is empty"),
        (b"\xff\n", "it is not UTF-8"),
        (b'{"prompt": "a", "forbidden": "("}\n', "policy.jsonl:1: forbidden is not a regular expression"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_policy(SuiteOptions(policy=path))
    path.write_text('{"prompt": "a", "forbidden": "b+"}\n')
    (rule,) = read_policy(SuiteOptions(policy=path))
    assert rule.forbidden.search("abb")
    assert read_policy(SuiteOptions()) == []
