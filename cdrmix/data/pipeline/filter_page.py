"""report.html of a preparation: a waterfall from read to kept documents, with samples; all text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdrmix.data.escaping import escape_unprintable
from cdrmix.page import escaped, html_page, tiles

STYLE = """
.fall{width:100%}
.fall th,.fall td{padding:.22rem .6rem}
.fall td:first-child{padding-left:0;white-space:normal;overflow-wrap:anywhere;min-width:11rem}
.fall td.track,.fall th.track{width:19%;min-width:6rem;text-align:left}
.fall .ends td{font-weight:600}
.fall .ends i{background:var(--soft)}
.track div{display:flex;height:.95rem}
.track i{background:var(--bar);border-radius:.2rem}
.track i.gone{background:var(--accent);min-width:2px}
.none td{color:var(--soft)}
a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:.2em}
details details,details>div>p,details>p{margin-left:1rem}
summary{margin:.35rem 0}
summary span{color:var(--soft);font-variant-numeric:tabular-nums}
.sample{margin:.6rem 0 1.4rem 1rem}
.sample p{overflow-wrap:anywhere;max-width:none;font-size:.9rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:0 1rem}
em{font-style:normal;font-size:.8em;border:1px solid var(--line);border-radius:.2rem;padding:0 .15em}
pre{max-height:16rem;overflow:auto;margin:.4rem 0;unicode-bidi:isolate}
bdi{unicode-bidi:isolate}
"""
STAGES = {
    "read_all": "read, clean, filter",
    "exact_duplicate": "exact duplicates",
    "duplicate_url_entries": "URLs, sorted",
    "duplicate_url": "URLs",
    "documents_per_host_entries": "hosts, sorted",
    "documents_per_host": "hosts",
    "signatures": "MinHash signatures",
    "pairs": "candidate pairs",
    "edges": "exact similarities",
    "near_duplicate": "clusters",
    "tokenizer_trained": "tokenizer training",
    "tokens": "tokens",
    "shards": "writing of shards",
}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
BARS = 16  # languages and domains shown; one more bar has the rest


def filter_page(content: Mapping[str, Any], configuration: str) -> str:
    """The page for the contents of report.json (see filter_report.py). configuration: YAML, shown folded."""
    shards = content["shards"]
    sections = [
        "<header><h1>Text preparation</h1></header>",
        _tiles(content, shards),
        _waterfall(content),
        _rules(content["rules"], content["bad_records"]),
        _near_duplicates(content["near_duplicates"]),
        _shares("Languages, by bytes", content["languages"], "bytes"),
        _shares("Domains, by tokens", content["domains"], "tokens"),
        _counts("Personal data and secrets: placeholders", content["pii"]),
        _counts("Fields that the chat template does not write: conversations", content["hidden"]),
        _stages(content),
        "<h2>Configuration</h2><details><summary>Every key, resolved</summary>"
        f"<pre>{shown(configuration)}</pre></details>",
    ]
    return html_page("Text preparation", sections, style=STYLE)


def shown(value: object) -> str:
    """Untrusted text as HTML: escaped, with control characters shown by name."""
    return escape_unprintable(escaped(value), lambda name: f"<em>{name}</em>")


def _tiles(content: Mapping[str, Any], shards: Mapping[str, Any]) -> str:
    unit = _unit(content["read"]["bytes"])
    kept, records = content["kept"], content["records"]
    return tiles(
        [
            (_count(kept["documents"]), f"documents kept of {records:,}"),
            (_size(kept["bytes"], unit), f"{unit[1]} kept of {_size(content['read']['bytes'], unit)}"),
            (_count(shards["tokens"]), f"tokens, {shards['bytes_per_token']:.2f} bytes each"),
            (_count(shards["rows"]), f"rows of {shards['row_length']:,}, {shards['padding_share']:.1%} filling"),
            (
                f"{shards['held_out_share']:.1%}",
                f"of documents held out, {shards['valid']['tokens'] / shards['tokens']:.1%} of tokens",
            ),
        ],
        stress_first=True,
    )


def _waterfall(content: Mapping[str, Any]) -> str:
    records, size = content["records"], content["read"]["bytes"]
    unit = _unit(size / 100)  # smaller than for the total, because one rule filters little

    def line(name: str, documents: int, left: int, gone: int | None, bytes_left: int, *, end: bool = False) -> str:
        """name: HTML. documents, gone (bytes; None: unknown): removed by the rule. left, bytes_left: remaining after
        it.
        """
        sign = "" if end else "&minus;"
        cells = f"<td>{name}</td>"
        for value, text, rest, whole in (
            (documents, f"{documents:,}", left, records),
            (gone or 0, _size(abs(gone or 0), unit), bytes_left, size),
        ):
            known = value or (end and value is not None)
            number = f"{'+' if value < 0 else sign}{text}" if known else "·"
            share = f"{value / whole:.2%}" if known and value > 0 and whole else ""
            bar = f'<i style="width:{_percent(rest, whole)}"></i>'
            if value > 0 and not end:
                bar += f'<i class="gone" style="width:{_percent(value, whole)}"></i>'
            cells += f'<td title="{value:,}">{number}</td><td>{share}</td><td class="track"><div>{bar}</div></td>'
        return f"<tr{' class=ends' if end else ''}>{cells}</tr>"

    left, bytes_left = records, size - content["cleaned_bytes"]
    lines = [line("read", records, records, size, size, end=True)]
    if content["cleaned_bytes"]:
        lines.append(line("markup, normalisation, placeholders", 0, records, content["cleaned_bytes"], bytes_left))
    for number, rule in enumerate(content["rules"]):
        if rule["documents"]:
            left, bytes_left = rule["left"]["documents"], rule["left"]["bytes"]
            name = f'<a href="#rule-{number}">{shown(rule["name"]).replace("_", "_<wbr>")}</a>'
            lines.append(line(name, rule["documents"], left, rule["bytes"], bytes_left))
    kept = content["kept"]
    lines.append(line("kept", kept["documents"], kept["documents"], kept["bytes"], kept["bytes"], end=True))
    heads = "".join(
        f'<th>{head}</th><th>share</th><th class="track"></th>' for head in ("documents", f"text, {unit[1]}")
    )
    return (
        '<h2>From read to kept</h2><div class="scroll"><table class="fall">'
        f"<tr><th></th>{heads}</tr>{''.join(lines)}</table></div>"
        '<p class="soft">The rules are listed in the order in which they are applied. A document counts for the first '
        "rule that filters it. Shares are of all documents read. Bytes are of UTF-8 text.</p>"
    )


def _rules(rules: Sequence[Mapping[str, Any]], bad: Mapping[str, Any]) -> str:
    idle = [rule for rule in rules if not rule["documents"]]
    parts = ["<h2>Filtered documents</h2>"]
    for number, rule in enumerate(rules):
        if rule["documents"]:
            samples = "".join(map(_sample, rule["samples"]))
            if rule["name"] == "bad_records":
                samples = _bad_records(bad)
            facts = f"{rule['documents']:,}, {rule['share']:.2%}"
            # The link target is inside the folded part, because browsers then unfold it.
            parts.append(
                f"<details><summary>{shown(rule['name'])} <span>{facts}</span></summary>"
                f'<div id="rule-{number}">{_description(rule)}{samples}</div></details>'
            )
    if len(idle) == len(rules):
        parts.append("<p>Every document was kept.</p>")
    if idle:
        entries = "".join(
            f"<details><summary>{shown(rule['name'])}</summary>{_description(rule)}</details>" for rule in idle
        )
        noun = "rule" if len(idle) == 1 else "rules"
        summary = f"{len(idle)} {noun} filtered nothing"
        parts.append(f"<details><summary><span>{summary}</span></summary>{entries}</details>")
    return "".join(parts)


def _description(rule: Mapping[str, Any]) -> str:
    bounds: dict[str, list[str]] = {}
    for domain, bound in rule["bounds"].items():
        bounds.setdefault("none" if bound is None else f"{bound:g}", []).append(domain)
    here = "; ".join(
        text if len(bounds) == 1 else f"{text} for {', '.join(domains)}" for text, domains in bounds.items()
    )
    return f"<p>{shown(rule['description'])}{f' Bound here: {shown(here)}.' if here else ''}</p>"


def _sample(sample: Mapping[str, Any]) -> str:
    facts = [f"<bdi>{shown(sample['where'])}</bdi>"]
    facts += [] if sample["score"] is None else [f"score {sample['score']:.6g}"]
    texts = [("" if sample["kept_instead"] is None else "filtered", sample["text"])]
    if sample["kept_instead"] is not None:
        texts.append(("kept instead", sample["kept_instead"]))
    columns = "".join(
        f'<div>{f"<p class=soft>{title}</p>" if title else ""}<pre dir="auto">{shown(text)}</pre></div>'
        for title, text in texts
        if text
    )
    return f'<div class="sample"><p class="soft">{" · ".join(facts)}</p><div class="pair">{columns}</div></div>'


def _near_duplicates(near_duplicates: Mapping[str, Any]) -> str:
    if not near_duplicates["candidate_pairs"]:
        return ""
    bins: dict[int, int] = {}  # by the power of two at or above the size
    for size, count in near_duplicates["cluster_sizes"].items():
        power = (int(size) - 1).bit_length()
        bins[power] = bins.get(power, 0) + count
    labels = [
        (f"{2**p // 2 + 1:,} to {2**p:,}" if p > 1 else "2", bins.get(p, 0)) for p in range(1, max(bins, default=0) + 1)
    ]
    funnel = [
        (_count(near_duplicates["candidate_pairs"]), "candidate pairs: a band of their signatures is equal"),
        (_count(near_duplicates["likely_pairs"]), "likely pairs, by the signatures"),
        (_count(near_duplicates["verified_pairs"]), "verified pairs, by the exact similarity"),
        (_count(sum(near_duplicates["cluster_sizes"].values())), "clusters"),
    ]
    histogram = f'<p class="soft">Clusters by their number of documents</p>{_bars(labels)}' if labels else ""
    return f"<h2>Near-duplicates</h2>{tiles(funnel, stress_first=False)}{histogram}"


def _shares(title: str, entries: Mapping[str, Mapping[str, Any]], of: str) -> str:
    """Bars of the share of each entry, the largest first. of: the count that the shares are of."""
    ordered = sorted(entries.items(), key=lambda item: -item[1]["share"])
    rows = [(name, entry["share"], entry["documents"], entry[of]) for name, entry in ordered[:BARS]]
    if rest := [entry for _, entry in ordered[BARS:]]:
        sums = [sum(entry[name] for entry in rest) for name in ("share", "documents", of)]
        rows.append((f"{len(rest)} others", sums[0], sums[1], sums[2]))
    if not rows:
        return ""
    unit = _unit(sum(row[3] for row in rows))
    lines = "".join(
        f"<tr><td><bdi>{shown(name)}</bdi></td><td>{documents:,}</td>"
        f"<td>{_size(amount, unit) if of == 'bytes' else f'{amount:,}'}</td><td>{share:.2%}</td>"
        f'<td class="track"><div><i style="width:{_percent(share, rows[0][1])}"></i></div></td></tr>'
        for name, share, documents, amount in rows
    )
    head = f"text, {unit[1]}" if of == "bytes" else of
    return (
        f'<h2>{title}</h2><div class="scroll"><table class="fall"><tr><th></th><th>documents</th><th>{head}</th>'
        f'<th>share</th><th class="track"></th></tr>{lines}</table></div>'
    )


def _counts(title: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    return f"<h2>{title}</h2>{_bars([(kind, count) for kind, count in counts.items()])}"


def _bars(rows: Sequence[tuple[str, int]]) -> str:
    most = max(count for _, count in rows)
    lines = "".join(
        f'<span>{shown(name)}</span><div><i style="width:calc({_percent(count, most)} * .78)"></i>{count:,}</div>'
        for name, count in rows
    )
    return f'<div class="bars">{lines}</div>'


def _stages(content: Mapping[str, Any]) -> str:
    lines = ""
    for stage in content["stages"]:
        rate = stage["megabytes_per_second"]
        size = f"{stage['bytes'] / 1e6:,.1f}" if stage["bytes"] else ""
        lines += (
            f"<tr><td>{shown(STAGES.get(stage['name'], stage['name']))}</td><td>{stage['seconds']:,.1f}</td>"
            f"<td>{size}</td><td>{'' if rate is None else f'{rate:,.1f}'}</td><td>{stage['cpu_seconds']:,.1f}</td></tr>"
        )
    if not lines:
        return ""
    return (
        '<h2>Time</h2><div class="scroll"><table><tr><th></th><th>seconds</th><th>MB</th><th>MB/s</th>'
        f"<th>CPU-seconds</th></tr>{lines}</table></div><p>Encoded with {shown(content['encoder'])}.</p>"
    )


def _bad_records(bad: Mapping[str, Any]) -> str:
    lines = "".join(f"<p><bdi>{shown(message)}</bdi></p>" for message in bad["shown"])
    more = bad["count"] - len(bad["shown"])
    return f'<div class="sample">{lines}{f"<p class=soft>and {more:,} more</p>" if more else ""}</div>'


def _count(count: int) -> str:
    """A count as text: exact, or rounded if it does not fit into a tile."""
    if count < 1e8:
        return f"{count:,}"
    return next(f"{count / size:,.2f}{unit}" for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= size)


def _unit(size: float) -> tuple[float, str]:
    """The unit for all sizes of a table: that of the total, so that the sizes can be compared."""
    return next((unit for unit in UNITS if size >= unit[0]), (1.0, "bytes"))


def _size(size: float, unit: tuple[float, str]) -> str:
    return f"{size:,.0f}" if unit[0] == 1 else f"{size / unit[0]:,.2f}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * min(max(part / whole, 0), 1):.2f}%" if whole else "0%"
