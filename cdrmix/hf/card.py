"""The model card: the file README.md of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.config.schema import Config

STAGE_A_ONLY = "Only stage A (the backbone) is trained: all phases of stage B (`reasoning.phases`) have 0 steps."

NAMES = {"rwkv7": "RWKV-7", "attention": "attention", "mamba2": "Mamba-2", "routing_mamba": "Routing-Mamba"}


def model_card(config: Config, step: int, stored: int, summary: Mapping[str, Any]) -> str:
    """Markdown with front matter: what the model is, its results on held-out text, and how to use it.

    stored: number of parameters in the files. summary: metrics.json of the run. Results that are missing, or that
    belong to another step, are omitted.
    """
    model = config.model
    feed_forward = model.feed_forward
    experts = (
        f"{feed_forward.experts} experts of {feed_forward.hidden}, top-{feed_forward.top_k} ({feed_forward.activation})"
        if feed_forward.kind == "moe"
        else f"dense {feed_forward.kind.replace('_', '-')} of {feed_forward.hidden}"
    )
    mixers_used = [*filter(model.mixers.__contains__, NAMES), *sorted({*model.mixers} - NAMES.keys())]
    counts = {NAMES.get(mixer, mixer): model.mixers.count(mixer) for mixer in mixers_used}
    mixers = ", ".join(f"{count} {name}" for name, count in counts.items())
    tags = [mixer.replace("_", "-") for mixer in mixers_used]
    tags += ["mixture-of-experts"] if model.routers else []
    kind = f"{'hybrid ' if len(counts) > 1 else ''}{'/'.join(counts)}"
    parameters = f"{stored:,} stored"
    if active := summary.get("parameters", {}).get("active"):
        parameters += f", {active:,} active per token"
    held_out = summary.get("held_out") if summary.get("held_out_step") == step else None
    return f"""---
library_name: cdrmix
pipeline_tag: text-generation
tags: [{", ".join(tags)}]
---

# {config.run.name}

A {kind} language model, trained by cdrmix for {step:,} steps of {config.train.batch_rows} rows of \
{config.data.row_length} tokens.{_stages(config)}

| | |
|---|---|
| parameters | {parameters} |
| layers | {model.layers} of width {model.d_model}: {mixers} |
| feed-forward | {experts} |
| vocabulary | {model.vocab_size:,} (byte-level BPE, in `tokenizer.json`) |
| weights | float32 safetensors |
| text | source `{config.data.source_kinds()}`, seed {config.run.seed} |
{_figures(held_out)}
## Use

    cdrmix generate --model PATH_OF_THIS_FOLDER --prompt "def "
    cdrmix eval --model PATH_OF_THIS_FOLDER

`sha256sum -c SHA256SUMS` verifies the files. cdrmix verifies them each time it loads them. The configuration
`config_snapshot.yaml` is complete: it reproduces the training.
"""


def _stages(config: Config) -> str:
    if config.reasoning is None:
        return ""
    phases = [f"{name} ({section.steps:,} steps)" for name, section in config.reasoning.phases if section.steps]
    if not phases:
        return f"\n\n**{STAGE_A_ONLY}**"
    return f" Of these, stage B: {', '.join(phases)}; `cdrmix reason demo` shows it at work."


def _figures(held_out: Mapping[str, Any] | None) -> str:
    if not held_out:
        return ""
    return f"""
## Held-out text

{held_out["tokens"]:,} tokens, {held_out["text_bytes"]:,} bytes that were not in the training text; lower is better.

| | bits per byte |
|---|---|
| this model | **{held_out["bits_per_byte"]:.4f}** (perplexity per token {held_out["perplexity"]:.3f}) |
| unigram distribution of the same tokens | {held_out["unigram_bits_per_byte"]:.4f} |
| gzip -9 | {held_out["gzip9_bits_per_byte"]:.4f} |
| zstd -19 | {held_out["zstd19_bits_per_byte"]:.4f} |
"""
