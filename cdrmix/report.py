"""The report of a run: loss.png, load.png and one report.html that needs no network."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import write_atomically
from cdrmix.plot import DARK, LAST_ROWS, LIGHT, draw, draw_load
from cdrmix.train.metrics import amount, clock
from cdrmix.train.run import RunFolder, read_metrics

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f5f6f9;--ink:#1f2430;--soft:#5b6472;--line:#dfe3ea;--accent:#d9480f;
--bar:#9db8ea}
@media (prefers-color-scheme:dark){:root{--paper:#14171d;--card:#1d222b;--ink:#dfe3ea;--soft:#98a2b3;--line:#2f3642;
--accent:#ff9457;--bar:#3d5d96}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:.2rem 0}
h2{font-size:1.15rem;margin:2.4rem 0 .7rem}
p{margin:.4rem 0;max-width:46rem}
.soft{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.7rem;margin:1.2rem 0}
.tile{background:var(--card);border-radius:.6rem;padding:.7rem .9rem}
.tile b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile.first b{color:var(--accent)}
.tile span{color:var(--soft);font-size:.85rem}
.bars{display:grid;grid-template-columns:max-content 1fr;gap:.35rem .8rem;align-items:center}
.bars i{display:block;height:1.15rem;border-radius:.25rem;background:var(--bar);min-width:2px}
.bars .own{background:var(--accent)}
.bars div{display:flex;align-items:center;gap:.6rem;font-variant-numeric:tabular-nums}
img{width:100%;height:auto;border-radius:.6rem;border:1px solid var(--line)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;min-width:min(100%,28rem)}
th,td{text-align:right;padding:.3rem .8rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
th{font-weight:600;color:var(--soft)}
td.text{text-align:left;white-space:normal;overflow-wrap:anywhere}
.bad{color:var(--accent);font-weight:600}
pre{background:var(--card);border-radius:.6rem;padding:.9rem 1rem;overflow-x:auto;font-size:.85rem;line-height:1.45;
white-space:pre-wrap;overflow-wrap:anywhere}
pre em{font-style:normal;color:var(--soft)}
summary{cursor:pointer;margin:.6rem 0}
"""


CURVES = "Loss, load entropy of the experts, learning rate and gradient norm by step"
UNHEALTHY: dict[str, Callable[[float], bool]] = {
    "entropy_normalised": lambda value: value < 0.95,
    "fullest": lambda value: value > 1.3,
    "overflow": lambda value: value >= 0.05,
    "dead_experts": lambda value: value > 0,
}


def write_report(run: RunFolder) -> Path:
    """Draws loss.png, of routed blocks load.png, and writes report.html, all from the run folder; returns its path.

    Works for a run at any point of its life: what has not happened yet is left out.
    """
    rows, summary = read_metrics(run.metrics_jsonl), run.summary()
    title = f"{summary.get('name', 'run')}, {run.path.name}"
    curves = [draw(rows, summary.get("held_out"), title=title, palette=palette) for palette in (LIGHT, DARK)]
    loads = [picture for palette in (LIGHT, DARK) if (picture := draw_load(rows, title=title, palette=palette))]
    write_atomically(run.plot, curves[0])
    if loads:
        write_atomically(run.load_plot, loads[0])
    write_atomically(run.report, page(run, rows, summary, curves, loads))
    return run.report


def page(
    run: RunFolder,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    curves: Sequence[bytes],
    loads: Sequence[bytes],
) -> str:
    """The HTML text: pictures embedded, style inline, every value escaped.

    curves, loads: the pictures of the run, light and dark; no loads where nothing was routed.
    """
    config = run.config_snapshot.read_text(encoding="utf-8")
    sections = [
        f"<header><h1>{_text(summary.get('name', 'run'))}</h1><p class=soft>{_text(run.path.name)}</p>"
        + (f"<p>{_text(summary['not_trained'])}</p>" if summary.get("not_trained") else "")
        + "</header>",
        _tiles(rows, summary),
        _held_out(summary.get("held_out")),
        f"<h2>Curves</h2>{_picture(curves, CURVES)}",
        _router(rows),
        _picture(loads, "Load of every expert by step, a heat map a block") if loads else "",
        _sample(summary.get("sample")),
        _facts("Text", summary.get("corpus")),
        _checkpoints(run.checkpoints),
        _facts("Export", summary.get("export")),
        f"<h2>Configuration</h2><details><summary>config_snapshot.yaml: reproduces this run by itself</summary>"
        f"<pre>{_text(config)}</pre></details>",
        _facts("Environment", summary.get("environment")),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(summary.get('name', 'run'))}: {_text(run.path.name)}</title>"
        f"<style>{STYLE}</style></head>\n<body>"
        + "\n".join(section for section in sections if section)
        + "</body></html>\n"
    )


def _tiles(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    held_out, parameters = summary.get("held_out"), summary.get("parameters")
    tiles: list[tuple[str, str]] = []
    if held_out:
        tiles += [
            (f"{held_out['bits_per_byte']:.3f}", "bits per byte of held-out text"),
            (f"{held_out['bits_per_byte'] / held_out['unigram_bits_per_byte']:.3f}", "of the unigram's bits"),
            (f"{held_out['perplexity']:.2f}" if held_out["perplexity"] else "-", "perplexity per token"),
        ]
    if parameters:
        tiles.append((amount(parameters["active"]), f"active parameters of {amount(parameters['stored'])}"))
    if rows:
        last = rows[-1]
        rates = sorted(row["tokens_per_second"] for row in rows if row["tokens_per_second"])
        tiles += [
            (f"{last['step']:,}", f"steps, {last['epoch']:.2f} epochs"),
            (amount(last["tokens"]), f"tokens in {clock(last['seconds'])}"),
        ]
        if rates:
            tiles.append((amount(rates[len(rates) // 2]), "tokens a second, median"))
    else:
        tiles.append(("0", "steps so far"))
    cells = "".join(
        f'<div class="tile{" first" if number == 0 and held_out else ""}"><b>{_text(value)}</b>'
        f"<span>{_text(label)}</span></div>"
        for number, (value, label) in enumerate(tiles)
    )
    return f'<div class="tiles">{cells}</div>'


def _held_out(held_out: Mapping[str, Any] | None) -> str:
    if not held_out:
        return ""
    bars = [("this model", "bits_per_byte"), ("zstd -19", "zstd19_bits_per_byte")]
    bars += [("gzip -9", "gzip9_bits_per_byte"), ("unigram", "unigram_bits_per_byte")]
    longest = max(held_out[key] for _, key in bars)
    lines = "".join(
        f'<span>{name}</span><div><i class="{"own" if key == "bits_per_byte" else ""}" '
        f'style="width:{78 * held_out[key] / longest:.1f}%"></i>{held_out[key]:.3f}</div>'
        for name, key in bars
    )
    return (
        f'<h2>Held-out text, bits per byte</h2><div class="bars">{lines}</div>'
        f'<p class="soft">{held_out["tokens"]:,} predicted tokens, {held_out["text_bytes"]:,} bytes; less is better. '
        "The unigram figure is the entropy of the held-out tokens' own distribution; gzip and zstd compress the whole "
        "held-out text as one stream.</p>"
    )


def _picture(pictures: Sequence[bytes], words: str) -> str:
    light, dark = pictures

    def uri(picture: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")

    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{uri(dark)}">'
        f'<img alt="{_text(words)}" src="{uri(light)}">'
        "</picture>"
    )


def _router(rows: Sequence[Mapping[str, Any]]) -> str:
    last = [row for row in rows if row.get("router", {}).get("entropy_bits")][-LAST_ROWS:]
    if not last:
        return ""
    layers = range(len(last[0]["router"]["entropy_bits"]))
    means = {
        name: [sum(row["router"][name][layer] for row in last) / len(last) for layer in layers]
        for name in last[-1]["router"]
        if all(name in row["router"] for row in last)
    }
    if all(row.get("load") for row in last):
        loads = [[row["load"][layer] for row in last] for layer in layers]
        means["fullest"] = [max(map(sum, zip(*each, strict=True))) * len(each[0]) / len(last) for each in loads]
    columns = [
        ("entropy_bits", "load entropy, bits", "{:.3f}"),
        ("entropy_normalised", "normalised", "{:.3f}"),
        ("max_over_mean", "fullest / mean", "{:.2f}"),
        ("fullest", "of the summed load", "{:.2f}"),
        ("overflow", "overflow at capacity", "{:.1%}"),
        ("dropped", "dropped", "{:.1%}"),
        ("dead_experts", "idle experts", "{:.1f}"),
    ]
    columns = [column for column in columns if column[0] in means]
    head = "".join(f"<th>{label}</th>" for _, label, _ in columns)
    body = ""
    for layer in layers:
        cells = ""
        for name, _, form in columns:
            value = means[name][layer]
            bad = name in UNHEALTHY and UNHEALTHY[name](value)
            cells += f"<td{' class=bad' if bad else ''}>{form.format(value)}</td>"
        body += f"<tr><td>{layer}</td>{cells}</tr>"
    return (
        f'<h2>Routers, mean of the last {len(last)} logged steps</h2><div class="scroll">'
        f"<table><tr><th>block</th>{head}</tr>{body}</table></div>"
        '<p class="soft">Each step is a global batch; the fullest expert is also that of their summed load. Overflow '
        "says what share of routed tokens is above the capacity, dropped what share was dropped for it: none, unless "
        "the configuration asks to. Coloured: normalised entropy below 0.95, the fullest expert of the summed load "
        "above 1.3 times the mean, overflow of 5% and more, idle experts.</p>"
    )


def _sample(sample: Mapping[str, str] | None) -> str:
    if not sample:
        return ""
    return f"<h2>It writes</h2><pre><em>{_text(sample['prompt'])}</em>{_text(sample['text'])}</pre>"


def _facts(title: str, facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return ""
    lines = "".join(
        f'<tr><td>{_text(name.replace("_", " "))}</td><td class="text">{_text(value)}</td></tr>'
        for name, value in _flat(facts)
    )
    return f'<h2>{_text(title)}</h2><div class="scroll"><table>{lines}</table></div>'


def _flat(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, f"{value:,}"
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _checkpoints(folder: Path) -> str:
    found = sorted(path for path in folder.glob("*") if path.is_dir() and (path / "manifest.json").is_file())
    if not found:
        return ""
    lines = ""
    for path in found:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        lines += f"<tr><td>{_text(path.name)}</td><td>{size / 2**20:,.1f} MiB</td></tr>"
    return f'<h2>Checkpoints</h2><div class="scroll"><table>{lines}</table></div>'


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
