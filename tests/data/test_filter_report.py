"""The drop report: its sums add up, every rule is in its place, and no text of strangers becomes markup."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdrmix.data.cleaning.rules import GROUPS, RULES
from cdrmix.data.escaping import escape_unprintable
from cdrmix.data.pipeline.filter_page import filter_page
from cdrmix.data.pipeline.filter_report import gather
from cdrmix.data.pipeline.stats import SAMPLES, Amount, Filtered, PipelineStats, Sample
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import Stratum

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><a href="javascript:alert(1)">\'',
    "</pre></details></body>",
    "\x1b[31m\x00\x07\x9b2J\r\x0b\x7f",
    "\u202eright to left\u2066\u2069\u200f\u2028\ufeff",
    "&lt;b&gt; &amp; &#x202e;",
    "\ud800 lone surrogate",
]
REPORT = {
    "documents": 6,
    "text_bytes": 900,
    "tokens": 300,
    "bytes_per_token": 3.0,
    "rows": 5,
    "row_length": 64,
    "padding_share": 0.1,
    "held_out_share": 0.2,
    "valid": {"tokens": 2},
}
TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "header",
    "h1",
    "h2",
    "p",
    "div",
    "span",
    "b",
    "i",
    "em",
    "bdi",
}
TAGS |= {"table", "tr", "th", "td", "a", "details", "summary", "pre", "wbr"}
VOID = {"meta", "wbr"}


class Reader(HTMLParser):
    """What a browser would make of a page: every tag closed in its order, the texts of <pre>, the bars' widths."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pre: list[str] = []
        self.rows: list[list[str]] = []
        self.bars: list[list[list[float]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        attributes = dict(attrs)
        assert attributes.keys() <= {
            "class",
            "id",
            "style",
            "href",
            "title",
            "dir",
            "lang",
            "name",
            "content",
            "charset",
            "http-equiv",
        }
        if "href" in attributes:
            self.links.append(attributes["href"] or "")
        if "id" in attributes:
            self.ids.append(attributes["id"] or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")
        if tag == "tr":
            self.rows.append([])
            self.bars.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            if attributes.get("class") == "track":
                self.bars[-1].append([])
        if tag == "i" and "td" in self.open:
            style = re.fullmatch(r"width:([\d.]+)%", attributes["style"] or "")
            assert style
            self.bars[-1][-1].append(float(style[1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data
        if "pre" in self.open:
            self.pre[-1] += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def tally_of(**filtered: Filtered) -> PipelineStats:
    """Statistics with six kept documents of 900 bytes, and the given filtered ones."""
    stats = PipelineStats(kept=Amount(6, 900), filtered=filtered)
    late = ("exact_duplicate", "duplicate_url", "documents_per_host", "near_duplicate")
    for name, amount in filtered.items():
        if name in late:
            stats.kept.add(amount.bytes, amount.documents)
    stats.read = Amount(
        6 + sum(amount.documents for amount in filtered.values()),
        1000 + sum(amount.bytes for amount in filtered.values()),
    )
    return stats


def contents(
    make_config: Any, stats: PipelineStats, near_duplicates: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    stages = {
        "read_all": {"seconds": 2.0, "cpu_seconds": 3.0, "bytes": 5_000_000},
        "pairs": {"seconds": 0.0, "cpu_seconds": 0.0, "bytes": 0},
    }
    strata = [Stratum("text", 0, 0, 5, 300, 6)]
    content = gather(make_config(None, **data), stats, near_duplicates or {}, REPORT, stages, "fastokens 1.0", strata)
    return json.loads(json.dumps(content, allow_nan=False))


def read(content: dict[str, Any]) -> Reader:
    page = filter_page(content, "key: value")
    page.encode("utf-8")
    assert not [
        c for c in page if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t\u200c\u200d"
    ]
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    reader = Reader(page)
    assert {link.removeprefix("#") for link in reader.links} <= {*reader.ids}
    return reader


def waterfall(reader: Reader) -> dict[str, tuple[list[str], list[list[float]]]]:
    """Rows of the first table after its head, by name."""
    names = [row[0] for row in reader.rows]
    chosen = range(names.index("read"), names.index("kept") + 1)
    return {names[number]: (reader.rows[number], reader.bars[number]) for number in chosen}


def check_sums(report: dict[str, Any]) -> None:
    """Every rule's `left` is what the rule before it left, less its own; the last is what was kept."""
    documents, size = report["records"], report["read"]["bytes"] - report["cleaned_bytes"]
    for rule in report["rules"]:
        documents, size = documents - rule["documents"], size - (rule["bytes"] or 0)
        assert rule["left"] == {"documents": documents, "bytes": size}
        assert len(rule["samples"]) == min(rule["documents"], SAMPLES) or rule["name"] == "bad_records"
        assert rule["description"]
    assert {"documents": documents, "bytes": size} == report["kept"]


def test_a_preparation_s_report_adds_up(make_config: Any, tmp_path: Path) -> None:
    sentence = "The river that we crossed was of a colour which nobody had seen before, and {} of us have gone back. "
    texts = ["\n".join(sentence.format(number * 100 + line) for line in range(12)) for number in range(30)]
    lines = [{"text": text, "url": f"https://host{number}.org/a"} for number, text in enumerate(texts)]
    lines += [{"text": f"Write to someone@example.com. {text}"} for text in texts[9:10]]  # nearly the same
    lines += [{"text": f"{texts[0]} \n"}, {"text": " \n "}, {"text": "short"}, {"text": "{" * 300}]
    lines += [
        {"text": "Another one. " * 3 + "Different words {} here.".format("x " * 200), "url": "https://host3.org/a#b"}
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{not JSON\n")
    other = tmp_path / "b.jsonl"
    other.write_text("".join(json.dumps({"text": f"code {number} " * 40}) + "\n" for number in range(6)))
    config = make_config(
        None,
        domains={
            "web": {
                "source": {"kind": "jsonl", "paths": [str(path)]},
                "filters": {"rules": ["length", "c4_curly_brackets"]},
            },
            "code": {
                "source": {"kind": "jsonl", "paths": [str(other)]},
                "filters": {"rules": ["code_longest_line", "length"], "bounds": {"length": 20}},
            },
        },
        pii={"kinds": ["email"]},
        dedup={"url": True, "documents_per_host": 5},
    )
    shards = prepare(config, say=lambda line: None)
    report = json.loads((shards.path / "report" / "report.json").read_text())
    rules = {rule["name"]: rule for rule in report["rules"]}
    filters = ["length", "c4_curly_brackets", "code_longest_line"]
    duplicates = ["exact_duplicate", "duplicate_url", "documents_per_host", "near_duplicate"]
    assert [*rules] == ["bad_records", "empty", *filters, *duplicates]
    found = {name: rule["documents"] for name, rule in rules.items()}
    assert {name: count for name, count in found.items() if count} == {
        "bad_records": 1,
        "empty": 1,
        "length": 1,
        "c4_curly_brackets": 1,
        "exact_duplicate": 1,
        "duplicate_url": 1,
        "near_duplicate": 1,
    }
    check_sums(report)
    assert report["records"] == len(lines) + 1 + 6
    assert report["read"]["bytes"] == sum(len(line["text"]) for line in lines) + sum(
        len(f"code {n} " * 40) for n in range(6)
    )
    assert rules["length"]["bounds"] == {"web": RULES["length"].bound, "code": 20}
    assert RULES["length"].description in rules["length"]["description"]
    assert rules["length"]["samples"][0]["score"] == 5
    assert rules["length"]["samples"][0]["where"].endswith("a.jsonl:34")
    (near,) = rules["near_duplicate"]["samples"]
    assert {near["text"][:9], near["kept_instead"][:9]} == {"Write to ", "The river"}
    assert any(text.startswith("Write to <EMAIL>. The river") for text in (near["text"], near["kept_instead"]))
    assert report["near_duplicates"]["cluster_sizes"] == {"2": 1}
    assert report["near_duplicates"]["verified_pairs"] == 1
    assert report["pii"] == {"email": 1}
    assert report["domains"]["code"]["documents"] == 6
    assert (
        sum(domain["tokens"] for domain in report["domains"].values()) == shards.report["tokens"] - 2
    )  # one begins each split
    for shares in (report["domains"], report["languages"]):
        assert math.isclose(sum(entry["share"] for entry in shares.values()), 1)
    assert {"read_all", "exact_duplicate", "signatures", "tokens"} <= {stage["name"] for stage in report["stages"]}
    assert report["bad_records"]["count"] == 1
    assert "a.jsonl:37" in report["bad_records"]["shown"][0]
    reader = Reader((shards.path / "report" / "report.html").read_text())
    assert [*waterfall(reader)][1:-1] == [
        "markup, normalisation, placeholders",
        *(name for name in rules if found[name]),
    ]


def test_every_configured_rule_is_there_in_its_order(make_config: Any) -> None:
    rules = ["language", *GROUPS]
    content = contents(make_config, tally_of(), filters={"rules": rules, "languages": ["en"], "language_score": 0.5})
    names = [rule["name"] for rule in content["rules"]]
    expanded = [name for group in rules for name in GROUPS[group]]
    assert names == ["bad_records", "empty", *dict.fromkeys(expanded), "exact_duplicate", "near_duplicate"]
    assert content["rules"][2]["bounds"] == {"text": 0.5}


def test_nothing_dropped(make_config: Any) -> None:
    stats = tally_of()
    stats.read.bytes = 900
    content = contents(make_config, stats, dedup={"exact": False, "near_duplicates": False})
    check_sums(content)
    reader = read(content)
    assert "Every document was kept" in reader.words
    assert [*waterfall(reader)] == ["read", "kept"]
    assert content["stages"][0]["megabytes_per_second"] == 2.5
    assert content["stages"][1]["megabytes_per_second"] is None


def test_a_waterfall_of_sixty_rules_falls_from_read_to_kept(make_config: Any) -> None:
    """Each bar's rest and its part that goes are the rest of the bar above; 0.01: widths have two digits."""
    filtered = {
        f"rule_{number:02d}": Filtered(number + 1, 10 * number, [Sample(f"{number:032x}", "a:1", 0.5, "text")])
        for number in range(60)
    }
    stats = tally_of(**filtered)
    stats.kept.add(sum(amount.bytes for amount in filtered.values()))  # as if they came after reading
    content = contents(make_config, stats)
    reader = read(content)
    rows = waterfall(reader)
    assert [*rows] == ["read", "markup, normalisation, placeholders", *filtered, "kept"]
    assert rows["rule_59"][0][1] == "\N{MINUS SIGN}60"
    assert rows["kept"][0][1] == "6"
    for column, kept in ((0, 6 / (6 + 1830)), (1, 900 / (1000 + 17700))):
        rest = 100.0
        for name, (_, bars) in rows.items():
            assert sum(bars[column]) == pytest.approx(rest, abs=0.011), name
            rest = bars[column][0]
        assert rest == pytest.approx(100 * kept, abs=0.006)
    assert sum(link.startswith("#") for link in reader.links) == 60


@example(HOSTILE)
@given(st.lists(st.text(st.characters(), max_size=40), min_size=1, max_size=8))
def test_texts_of_strangers_stay_texts(texts: list[str]) -> None:
    samples = [
        {"hash": "", "where": text, "score": None, "text": f"a{text}", "kept_instead": f"b{text}"} for text in texts
    ]
    rule = {"description": texts[0], "bounds": {texts[0]: 1.0, "x": 2.0}, "documents": 1, "bytes": 1}
    rule |= {"samples": samples, "share": 1.0, "byte_share": 1.0, "left": {"documents": 0, "bytes": 0}}
    amount = {"documents": 1, "bytes": 1, "tokens": 1, "rows": 1, "share": 1.0}
    content = {
        "records": 1,
        "read": {"documents": 1, "bytes": 1},
        "cleaned_bytes": 0,
        "kept": {"documents": 0, "bytes": 0},
        "rules": [{**rule, "name": text} for text in texts] + [{**rule, "name": "bad_records"}],
        "near_duplicates": {
            "candidate_pairs": 1,
            "likely_pairs": 1,
            "verified_pairs": 1,
            "cluster_sizes": {"2": 1, "300": 2},
        },
        "languages": dict.fromkeys(texts, amount),
        "domains": dict.fromkeys(texts, amount),
        "pii": dict.fromkeys(texts, 1),
        "hidden": dict.fromkeys(texts, 1),
        "bad_records": {"count": 9, "shown": texts},
        "encoder": texts[0],
        "stages": [
            {"name": text, "seconds": 1.0, "cpu_seconds": 1.0, "bytes": 1, "megabytes_per_second": 1.0}
            for text in texts
        ],
        "shards": REPORT,
    }
    reader = read(content)
    expected = [escape_unprintable(f"{side}{text}", str) for text in texts for side in "ab"]
    assert reader.pre == [*(expected * (len(texts))), "key: value"]


@given(st.text(st.characters()))
@example("".join(HOSTILE))
def test_visible_keeps_what_is_harmless_and_spells_the_rest(text: str) -> None:
    shown = escape_unprintable(text)
    assert all(
        character.isprintable() or character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"
        for character in shown
    )
    if text.isprintable():
        assert shown == text
    if "<U+" not in text:
        assert re.sub(r"<U\+([0-9A-F]{4,6})>", lambda match: chr(int(match[1], 16)), shown) == text
