"""The report of a run: loss.png, load.png and report.html, a page that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import write_atomically
from cdrmix.eval.rows import read_rows
from cdrmix.page import escaped, html_page, picture, tiles
from cdrmix.records import Extension, StepRecord, read_records
from cdrmix.report.domains import domains_section
from cdrmix.report.parts import parts_section
from cdrmix.report.plots import DARK, LAST_ROWS, LIGHT, draw, draw_load
from cdrmix.report.stage_b import rollouts_section, stage_b_sections
from cdrmix.report.suites import suites_section
from cdrmix.run_folder import RunFolder
from cdrmix.units import amount, clock

CURVES = "Loss, entropy of the expert load, learning rate and gradient norm over the steps"
UNHEALTHY: dict[str, Callable[[float], bool]] = {
    "entropy_normalised": lambda value: value < 0.95,
    "fullest": lambda value: value > 1.3,
    "overflow": lambda value: value >= 0.05,
    "dead_experts": lambda value: value > 0,
}


def write_report(run: RunFolder) -> Path:
    """Writes loss.png, load.png (if the model has routers) and report.html from the run folder. Returns report.html.

    It works at any point of a run. Results that do not exist yet are omitted.
    """
    (rows, of_phases), summary = read_records(run.metrics_jsonl), run.summary()
    title = f"{summary.get('name', 'run')}, {run.path.name}"
    curves = [draw(rows, summary.get("held_out"), title=title, palette=palette) for palette in (LIGHT, DARK)]
    loads = [drawn for palette in (LIGHT, DARK) if (drawn := draw_load(rows, title=title, palette=palette))]
    write_atomically(run.plot, curves[0])
    if loads:
        write_atomically(run.load_plot, loads[0])
    results = [
        domains_section(rows, summary, title),
        parts_section(rows, title),
        *stage_b_sections(of_phases, summary, title),
    ]
    results.append(suites_section(read_rows(run.evaluation_rows), title))
    write_atomically(run.report, page(run, rows, summary, curves, loads, results))
    return run.report


def page(
    run: RunFolder,
    rows: Sequence[StepRecord],
    summary: Mapping[str, Any],
    curves: Sequence[bytes],
    loads: Sequence[bytes],
    results: Sequence[str] = (),
) -> str:
    """The HTML text: pictures embedded, style inline, every value escaped.

    curves, loads: the pictures of the run, light and dark; no loads where nothing was routed. results: sections that
    follow the figures of the whole held-out text.
    """
    config = run.config_snapshot.read_text(encoding="utf-8", errors="replace")
    sections = [
        f"<header><h1>{escaped(summary.get('name', 'run'))}</h1><p class=soft>{escaped(run.path.name)}</p>"
        + (f"<p>{escaped(summary['not_trained'])}</p>" if summary.get("not_trained") else "")
        + "</header>",
        _tiles(rows, summary),
        _held_out(summary.get("held_out")),
        *results,
        f"<h2>Curves</h2>{picture(curves, CURVES)}",
        _depths(rows),
        _router(rows),
        _depth(rows),
        picture(loads, "Load of each expert over the steps: one heat map for each block") if loads else "",
        _sample(summary.get("sample")),
        _demonstration(summary.get("demonstration")),
        rollouts_section(run.rollouts),
        _facts("Text", summary.get("corpus")),
        _checkpoints(run.checkpoints),
        _facts("Export", summary.get("export")),
        _extensions(run.extensions),
        f"<h2>Configuration</h2><details><summary>config_snapshot.yaml: the complete configuration</summary>"
        f"<pre>{escaped(config)}</pre></details>",
        _facts("Environment", summary.get("environment")),
    ]
    return html_page(f"{summary.get('name', 'run')}: {run.path.name}", sections)


def _tiles(rows: Sequence[StepRecord], summary: Mapping[str, Any]) -> str:
    held_out, parameters = summary.get("held_out"), summary.get("parameters")
    facts: list[tuple[str, str]] = []
    if held_out:
        facts += [
            (f"{held_out['bits_per_byte']:.3f}", "bits per byte of held-out text"),
            (_ratio(held_out["bits_per_byte"], held_out["unigram_bits_per_byte"]), "of the unigram baseline"),
            (f"{held_out['perplexity']:.2f}" if math.isfinite(held_out["perplexity"]) else "-", "perplexity per token"),
        ]
    if parameters:
        facts.append((amount(parameters["active"]), f"active parameters of {amount(parameters['stored'])}"))
    if rows:
        last = rows[-1]
        rates = sorted(row.tokens_per_second for row in rows if row.tokens_per_second > 0)
        facts += [
            (f"{last.step:,}", f"steps, {last.epoch:.2f} epochs"),
            (amount(last.tokens), f"tokens in {clock(last.seconds)}"),
        ]
        if rates:
            facts.append((amount(rates[len(rates) // 2]), "tokens per second, median"))
    else:
        facts.append(("0", "steps so far"))
    if summary.get("restarts"):
        lost = summary.get("lost_seconds", 0.0)
        share = 100 * lost / ((lost + (rows[-1].seconds if rows else 0.0)) or 1.0)
        text = f"restarts after faults, {clock(lost)} lost ({share:.1f} % of the time)"
        facts.append((str(summary["restarts"]), text))
    return tiles(facts, stress_first=bool(held_out))


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base > 0 else "-"


def _held_out(held_out: Mapping[str, Any] | None) -> str:
    if not held_out:
        return ""
    bars = [("this model", "bits_per_byte"), ("zstd -19", "zstd19_bits_per_byte")]
    bars += [("gzip -9", "gzip9_bits_per_byte"), ("unigram", "unigram_bits_per_byte")]
    longest = max((held_out[key] for _, key in bars if held_out[key] > 0), default=1.0)
    lines = "".join(
        f'<span>{name}</span><div><i class="{"own" if key == "bits_per_byte" else ""}" '
        f'style="width:{78 * held_out[key] / longest:.1f}%"></i>{held_out[key]:.3f}</div>'
        for name, key in bars
    )
    return (
        f'<h2>Held-out text, bits per byte</h2><div class="bars">{lines}</div>'
        f'<p class="soft">{held_out["tokens"]:,} predicted tokens, {held_out["text_bytes"]:,} bytes; lower is better. '
        "Unigram is the entropy of the distribution of the held-out tokens. gzip and zstd compress the whole held-out "
        "text as one stream.</p>"
    )


def _extensions(rows: Sequence[Extension]) -> str:
    """What `--extend` has changed, and after which step."""
    lines = [
        f"<tr><td>{row.step:,}</td><td>{escaped(key)}</td><td>{escaped(before)}</td><td>{escaped(after)}</td></tr>"
        for row in rows
        for key, (before, after) in row.keys.items()
    ]
    head = "<tr><th>after step</th><th>key</th><th>before</th><th>since</th></tr>"
    return f'<h2>Extensions</h2><div class="scroll"><table>{head}{"".join(lines)}</table></div>' if lines else ""


def _depths(rows: Sequence[StepRecord]) -> str:
    """The losses of multi-token prediction, of the last steps at which every depth has one."""
    depths = max((row.prediction_losses for row in rows), key=len, default={}).keys()
    last = [row for row in rows if row.prediction_losses.keys() == depths][-LAST_ROWS:]
    if not depths:
        return ""
    means = {"1": sum(row.next_token_loss for row in last) / len(last)}
    means |= {depth: sum(row.prediction_losses[depth] for row in last) / len(last) for depth in depths}
    body = "".join(f"<tr><td>{escaped(depth)}</td><td>{nats:.3f}</td></tr>" for depth, nats in means.items())
    return (
        f'<h2>Depths of multi-token prediction, mean of {len(last)} logged steps</h2><div class="scroll">'
        f"<table><tr><th>depth</th><th>nats per token</th></tr>{body}</table></div>"
        '<p class="soft">Depth 1 is the next token. Evaluation counts depth 1 alone.</p>'
    )


def _router(rows: Sequence[StepRecord]) -> str:
    last = [row for row in rows if row.router.get("entropy_bits")][-LAST_ROWS:]
    if not last:
        return ""
    names = last[-1].router_names
    layers = range(len(names))
    means = {
        name: [sum(row.router[name][layer] for row in last) / len(last) for layer in layers]
        for name in last[-1].router
        if all(name in row.router for row in last)
    }
    if all(row.load for row in last):
        loads = [[row.load[layer] for row in last] for layer in layers]
        means["fullest"] = [max(map(sum, zip(*each, strict=True))) * len(each[0]) / len(last) for each in loads]
    columns = [
        ("entropy_bits", "load entropy, bits", "{:.3f}"),
        ("entropy_normalised", "normalised", "{:.3f}"),
        ("max_over_mean", "max / mean load", "{:.2f}"),
        ("fullest", "max / mean, summed", "{:.2f}"),
        ("overflow", "overflow at capacity", "{:.1%}"),
        ("dropped", "dropped", "{:.1%}"),
        ("dead_experts", "unused experts", "{:.1f}"),
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
        body += f"<tr><td>{escaped(names[layer])}</td>{cells}</tr>"
    return (
        f'<h2>Routers, mean of the last {len(last)} logged steps</h2><div class="scroll">'
        f"<table><tr><th>block</th>{head}</tr>{body}</table></div>"
        '<p class="soft">Each value is the mean over global batches. "max / mean, summed" is computed from the load '
        "summed over these steps. Overflow is the share of routed tokens above the capacity. Dropped is the share that "
        "was dropped, which is 0 unless model.feed_forward.drop is true. Coloured: normalised entropy below 0.95, "
        "max / mean, summed above 1.3, overflow of 5% or more, unused experts.</p>"
    )


def _depth(rows: Sequence[StepRecord]) -> str:
    every = [row.depth for row in rows if row.depth]
    last = [depth for depth in every if depth.keys() == every[-1].keys()][-LAST_ROWS:]
    if not last:
        return ""
    head = "".join(f"<th>{escaped(name)}</th>" for name in last[-1])
    cells = "".join(f"<td>{sum(row[name] for row in last) / len(last):.1%}</td>" for name in last[-1])
    return (
        f'<h2>Tokens kept by depth, mean of the last {len(last)} logged steps</h2><div class="scroll">'
        f"<table><tr><th>block</th>{head}</tr><tr><td>kept</td>{cells}</tr></table></div>"
        '<p class="soft">The share of the tokens of the global batches that the feed-forward of a block computed, or '
        "its mixer. The others were skipped (model.depth).</p>"
    )


def _sample(sample: Mapping[str, str] | None) -> str:
    if not sample:
        return ""
    return f"<h2>Sample</h2><pre><em>{escaped(sample['prompt'])}</em>{escaped(sample['text'])}</pre>"


def _demonstration(sample: Mapping[str, Any] | None) -> str:
    if not sample:
        return ""
    return f"<h2>Reading a document, chunk by chunk</h2><pre>{escaped(chr(10).join(sample['lines']))}</pre>"


def _facts(title: str, facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return ""
    lines = "".join(
        f'<tr><td>{escaped(name.replace("_", " "))}</td><td class="text">{escaped(value)}</td></tr>'
        for name, value in _flat(facts)
    )
    return f'<h2>{escaped(title)}</h2><div class="scroll"><table>{lines}</table></div>'


def _flat(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, f"{value:,}"
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _checkpoints(folder: Path) -> str:
    folders = sorted(path for path in folder.glob("*") if path.is_dir() and (path / "manifest.json").is_file())
    if not folders:
        return ""
    lines = ""
    for path in folders:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        lines += f"<tr><td>{escaped(path.name)}</td><td>{size / 2**20:,.1f} MiB</td></tr>"
    return f'<h2>Checkpoints</h2><div class="scroll"><table>{lines}</table></div>'
