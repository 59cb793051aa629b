"""Broken configurations: what is said about each, and that it is all said at once; what is near them and accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

# Lines are counted from here in the tables below.
GOOD = """\
model:
  d_model: 128
  layers: 4
  attention: {heads: 4}
  feed_forward: {hidden: 256}
train:
  steps: 500
  batch_rows: 8
  micro_batch_rows: 8
  learning_rate: 3e-3
"""
REASONING = (
    "reasoning: {plastic_lora: {rank: 4, alpha: 0.2, decay: 0.9}, memory: {dim: 8, top_k: 1, max_tokens: 8}, "
    "controller: {step_budget: 4, max_branches: 1}, rl: {horizon: 8, latency_weight: 0, stability_weight: 0}"
)
LLAMA = """\
model: {kind: huggingface, random: {model_type: llama, vocab_size: 300}}
data: {tokenizer: {path: tokenizer.json}}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""
LORA = LLAMA.replace("random: {model_type: llama, vocab_size: 300}", "path: models/a, lora: {quantize: nf4}")
TINY = f"base: {Path(__file__).parents[2] / 'configs' / 'cdrmix-reason-tiny.yaml'}\n"


class Instead(NamedTuple):
    """A part of GOOD, and what takes its place."""

    old: str
    new: str


class Overrides:
    """A configuration, and `key.path=value` each."""

    def __init__(self, text: str, *settings: str) -> None:
        self.text, self.settings = text, settings


Change = str | Instead | Overrides

# What is wrong: (the change, or several of the same kind, and the whole message after the headline; * is any text). A
# change that is a text alone is put in front of `train:`, into line 6.
PROBLEMS: dict[str, dict[str, tuple[Change | list[Change], str]]] = {
    "YAML and the top of the file": {
        "unknown section": (
            "loging: {wandb: true}",
            "run.yaml:6: loging: unknown key\n"
            "    allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation\n"
            "    did you mean logging?",
        ),
        "key of another section": (
            Instead("model:", "learning_rate: 1e-3\nmodel:"),
            "run.yaml:1: learning_rate: unknown key\n"
            "    allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation\n"
            "    did you mean train.learning_rate?",
        ),
        "YAML syntax": (
            Instead("  layers: 4", "  layers: [4"),
            "run.yaml:4: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        "tab": (Instead("  layers: 4", "\tlayers: 4"), "run.yaml:3: not valid YAML: *cannot start any token"),
    },
    "run": {
        "half a character in a key": (
            'run: {"\\ud800": 3}',
            "run.yaml:6: run: half of a surrogate pair in a key\n    allowed: a name",
        ),
        "half a character": (
            Instead("model:", 'run: {name: "\\ud800"}\nmodel:'),
            "run.yaml:1: run.name: half of a surrogate pair, which is not a character\n    allowed: Unicode text",
        ),
    },
    "model": {
        "string for an integer": (
            Instead("d_model: 128", "d_model: wide"),
            'run.yaml:2: model.d_model: found "wide" (a string)\n    allowed: an integer from 1 to 16777216',
        ),
        "true for an integer": (
            Instead("layers: 4", "layers: true"),
            "run.yaml:3: model.layers: found true (true/false)\n    allowed: an integer from 1 to 1024",
        ),
        "yes for true": (
            Instead("{heads: 4}", "{heads: 4, qk_norm: yes}"),
            'run.yaml:4: model.attention.qk_norm: found "yes" (a string)\n    allowed: true or false',
        ),
        "string for a section": (
            Instead("{heads: 4}", "rope"),
            'run.yaml:4: model.attention: found "rope" (a string)\n'
            "    allowed: a section with the keys heads, kv_heads, rope,*",
        ),
        "missing key that a size sets; what follows from it is not reported": (
            Instead("  d_model: 128\n", ""),
            "run.yaml:1: model.d_model: missing, and it has no default\n"
            "    allowed: an integer from 1 to 16777216; or set model.size (1b, 4b, 40b, 200b, dense-*), "
            "which sets it\n"
            "    meaning: Width of the residual stream.",
        ),
        "heads that do not divide the width": (
            Instead("{heads: 4}", "{heads: 3}"),
            "run.yaml:4: model.attention.heads: found 3 (an integer)\n    allowed: must divide model.d_model=128",
        ),
        "default that does not fit: the line of the other key": (
            Instead("d_model: 128", "d_model: 96"),
            "run.yaml:2: model.rwkv.head_size: found 64 (an integer)\n    allowed: must divide model.d_model=96",
        ),
        "more experts chosen than there are": (
            Instead("{hidden: 256}", "{hidden: 256, experts: 2, top_k: 3}"),
            "run.yaml:5: model.feed_forward.top_k: found 3 (an integer)\n"
            "    allowed: at most model.feed_forward.experts=2",
        ),
        "swiglu channel-mix": (
            Instead("{hidden: 256}", "{hidden: 256, kind: channel_mix, activation: swiglu}"),
            'run.yaml:5: model.feed_forward.activation: found "swiglu" (a string)\n'
            "    allowed: relu2, for model.feed_forward.kind=channel_mix",
        ),
        "small vocabulary": (
            Instead("layers: 4", "layers: 4\n  vocab_size: 256"),
            "run.yaml:4: model.vocab_size: found 256 (an integer)\n"
            "    allowed: at least 257 for a tokenizer trained on the corpus: 256 bytes and the end-of-text token",
        ),
        "odd head width with RoPE": (
            Instead(
                "  d_model: 128\n  layers: 4\n  attention: {heads: 4}",
                "  d_model: 192\n  layers: 4\n  attention: {heads: 64}",
            ),
            "run.yaml:2: model.attention.rope: found true (true/false)\n"
            "    allowed: false, or an even head width; model.d_model/model.attention.heads is 3",
        ),
        "grouped heads that do not come out even": (
            Instead("{heads: 4}", "{heads: 4, kv_heads: 3}"),
            "run.yaml:4: model.attention.kv_heads: found 3 (an integer)\n"
            "    allowed: must divide model.attention.heads=4",
        ),
        "merge key": (
            Instead("  layers: 4", "  layers: 4\n  <<: {layers: 5}"),
            "run.yaml:4: model.<<: unknown key (settings are shared by `base: FILE`, not by merge keys)\n"
            "    allowed: in model: kind, family,*",
        ),
        "tag that would run code": (
            Instead("layers: 4", "layers: !!python/object/apply:os.system [exit 1]"),
            "run.yaml:3: model.layers: the tag tag:yaml.org,2002:python/object/apply:os.system\n"
            "    allowed: untagged mappings, lists, strings, numbers, true, false and null",
        ),
        "a list as a key": (
            Instead("layers: 4", "layers: 4\n  ? [a]\n  : 3"),
            "run.yaml:4: model: a list or mapping as a key\n    allowed: a name",
        ),
        "vocabulary too small for the marks": (
            Instead("model:", "data: {objectives: {fim: {}}}\nmodel:\n  vocab_size: 259"),
            "run.yaml:3: model.vocab_size: found 259 (an integer)\n"
            "    allowed: at least 260 for a tokenizer *end-of-text token, and the three marks of "
            "data.objectives.fim",
        ),
        "a mixer that is none": (
            Instead("layers: 4", "layers: 4\n  mixer_layers: {mamba: [1]}"),
            "run.yaml:4: model.mixer_layers.mamba: unknown mixer\n"
            "    allowed: one of the mixers attention, rwkv7, mamba2, routing_mamba\n"
            "    did you mean model.mixer_layers.mamba2?",
        ),
        "a layer that is not there": (
            Instead("layers: 4", "layers: 4\n  mixer_layers:\n    mamba2: [0, 4]"),
            "run.yaml:5: model.mixer_layers.mamba2[1]: found 4 (an integer)\n"
            "    allowed: at most 3: layers count from 0, and model.layers=4",
        ),
        "a layer of two mixers": (
            Instead("layers: 4", "layers: 4\n  mixer_layers:\n    rwkv7: [2]\n    routing_mamba: [1, 2]"),
            "run.yaml:6: model.mixer_layers.routing_mamba[1]: found 2 (an integer)\n"
            "    allowed: each layer once in all of model.mixer_layers",
        ),
        "Mamba heads that do not fill the width": (
            Instead("layers: 4", "layers: 4\n  mixer_layers: {mamba2: [1]}\n  mamba: {head_dim: 48}"),
            "run.yaml:5: model.mamba.head_dim: found 48 (an integer)\n"
            "    allowed: must divide model.mamba.expand * model.d_model=256",
        ),
        "Mamba heads that do not fill the groups": (
            Instead("layers: 4", "layers: 4\n  mixer_layers: {routing_mamba: [1]}\n  mamba: {groups: 3}"),
            "run.yaml:5: model.mamba.groups: found 3 (an integer)\n"
            "    allowed: must divide model.mamba.expand * model.d_model / model.mamba.head_dim=4",
        ),
        "attention by name alone, with heads that do not divide the width": (
            Instead(
                "  layers: 4\n  attention: {heads: 4}",
                "  layers: 4\n  attention_fraction: 0\n  mixer_layers: {attention: [1]}\n  attention: {heads: 3}",
            ),
            "run.yaml:6: model.attention.heads: found 3 (an integer)\n    allowed: must divide model.d_model=128",
        ),
        "more experts chosen than there are, by a mixer alone": (
            Instead(
                "{hidden: 256}",
                "{hidden: 256, kind: channel_mix, experts: 2, top_k: 3}\n  mixer_layers: {routing_mamba: [0]}",
            ),
            "run.yaml:5: model.feed_forward.top_k: found 3 (an integer)\n"
            "    allowed: at most model.feed_forward.experts=2",
        ),
        "a dense layer that is not there": (
            Instead("{hidden: 256}", "\n    hidden: 256\n    dense_layers: [1, 4]"),
            "run.yaml:7: model.feed_forward.dense_layers[1]: found 4 (an integer)\n"
            "    allowed: at most 3: layers count from 0, and model.layers=4",
        ),
        "a layer that is dense twice": (
            Instead("{hidden: 256}", "{hidden: 256, dense_layers: [1, 1]}"),
            "run.yaml:5: model.feed_forward.dense_layers[1]: found 1 (an integer)\n"
            "    allowed: each layer once in model.feed_forward.dense_layers",
        ),
        "dense layers of a dense model": (
            Instead("{hidden: 256}", "{hidden: 256, kind: dense, dense_layers: [1]}"),
            "run.yaml:5: model.feed_forward.dense_layers: found a list of 1\n"
            "    allowed: [] for model.feed_forward.kind=dense, which has no mixture of experts",
        ),
        "a width of dense layers that there are not": (
            Instead("{hidden: 256}", "{hidden: 256, dense_hidden: 512}"),
            "run.yaml:5: model.feed_forward.dense_hidden: found 512 (an integer)\n"
            "    allowed: null without model.feed_forward.dense_layers",
        ),
        "a shared expert without experts": (
            Instead("{hidden: 256}", "{hidden: 256, kind: channel_mix, shared_hidden: 64}"),
            "run.yaml:5: model.feed_forward.shared_hidden: found 64 (an integer)\n"
            "    allowed: null for model.feed_forward.kind=channel_mix",
        ),
        "a channel-mix that skips tokens": (
            Instead("{hidden: 256}", "{hidden: 256, kind: channel_mix}\n  depth: {part: both}"),
            'run.yaml:6: model.depth.part: found "both" (a string)\n'
            "    allowed: mixer, or model.feed_forward.kind moe or dense: channel_mix does not skip tokens",
        ),
        "weights of other depths than there are": (
            Instead("layers: 4", "layers: 4\n  prediction: {tokens: 3, weights: [1, 0.5]}"),
            "run.yaml:4: model.prediction.weights: found a list of 2\n"
            "    allowed: null, or model.prediction.tokens=3 weights",
        ),
        "another weight of the next token than 1": (
            Instead("layers: 4", "layers: 4\n  prediction: {tokens: 2, weights: [0.5, 0.5]}"),
            "run.yaml:4: model.prediction.weights[0]: found 0.5 (a number)\n"
            "    allowed: 1: the weight of the next token",
        ),
        "a mixer of the depths that is none": (
            Instead("layers: 4", "layers: 4\n  prediction: {kind: sequential, mixer: mamba}"),
            'run.yaml:4: model.prediction.mixer: found "mamba" (a string)\n'
            "    allowed: one of attention, rwkv7, mamba2\n"
            "    did you mean mamba2?",
        ),
        "blocks of the depths with heads that do not divide the width": (
            Instead(
                "  layers: 4\n  attention: {heads: 4}",
                "  layers: 4\n  attention_fraction: 0\n  prediction: {kind: sequential}\n  attention: {heads: 3}",
            ),
            'run.yaml:6: model.prediction.mixer: found "attention" (a string)\n'
            "    allowed: another mixer, or model.attention.heads and kv_heads that divide model.d_model evenly",
        ),
        "depths without parameters that shall be detached": (
            Instead("layers: 4", "layers: 4\n  prediction: {kind: shared, detach: true}"),
            "run.yaml:4: model.prediction.detach: found true (true/false)\n"
            "    allowed: false, or another model.prediction.kind than shared, which has no parameters",
        ),
        "more depths than a row has targets": (
            Instead(
                "  feed_forward: {hidden: 256}\n",
                "  feed_forward: {hidden: 256}\n  prediction: {tokens: 9}\ndata: {row_length: 8}\n",
            ),
            "run.yaml:6: model.prediction.tokens: found 9 (an integer)\n"
            "    allowed: at most data.row_length=8, or the last depth has no targets",
        ),
        "quantized weights in stage 3, or offloaded": (
            [Overrides(LORA, "train.zero_stage=3"), Overrides(LORA, "train.zero_stage=auto", "train.offload=all")],
            'run.yaml:1: model.lora.quantize: found "nf4" (a string)\n'
            "    allowed: null, or train.zero_stage below 3 and train.offload none or optimizer",
        ),
        "mixers of a reasoning model that skip tokens": (
            Overrides(TINY, "model.depth.part=mixer"),
            "command line ('model.depth.part=mixer'): model.depth.part: found \"mixer\" (a string)\n"
            "    allowed: feed_forward in a run with a section reasoning: its adapters and memories read every "
            "token of a mixer",
        ),
    },
    "data": {
        "unknown kind of source": (
            "data: {source: {kind: jsnl, paths: [a]}}",
            'run.yaml:6: data.source.kind: found "jsnl" (a string)\n'
            "    allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or "
            "text\n"
            "    did you mean jsonl?",
        ),
        "source without a kind": (
            "data: {source: {paths: [a]}}",
            "run.yaml:6: data.source.kind: missing, and it has no default\n"
            "    allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or "
            "text",
        ),
        "key of another kind of source": (
            "data: {source: {kind: text, paths: [a], text_field: body}}",
            "run.yaml:6: data.source.text_field: not a key of kind=text, but of csv, huggingface, jsonl, parquet\n"
            "    allowed: in data.source: kind, paths",
        ),
        "no paths": (
            "data: {source: {kind: text, paths: []}}",
            "run.yaml:6: data.source.paths: found a list of 0\n"
            "    allowed: a list of at least 1, each a string that is not empty",
        ),
        "unknown key of a domain": (
            "data: {domains: {web: {source: {kind: text, paths: [a]}, prority: 2}}}",
            "run.yaml:6: data.domains.web.prority: unknown key\n"
            "    allowed: in data.domains.web: source, priority,*\n"
            "    did you mean data.domains.web.priority?",
        ),
        "unknown kind of a domain's source": (
            "data: {domains: {web: {source: {kind: jsnl, paths: [a]}}}}",
            'run.yaml:6: data.domains.web.source.kind: found "jsnl" (a string)\n'
            "    allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or "
            "text\n"
            "    did you mean jsonl?",
        ),
        "key of another kind in a domain": (
            "data: {domains: {web: {source: {kind: text, paths: [a], text_field: b}}}}",
            "run.yaml:6: data.domains.web.source.text_field: not a key of kind=text, but of csv, huggingface, "
            "jsonl, parquet\n"
            "    allowed: in data.domains.web.source: kind, paths",
        ),
        "domain without a source": (
            "data: {domains: {web: {priority: 2}}}",
            "run.yaml:6: data.domains.web.source: missing, and it has no default\n"
            "    allowed: a section whose kind is one of chat,*\n"
            "    meaning: Where the text comes from.",
        ),
        "string for a bound": (
            "data: {filters: {bounds: {mean_length: high}}}",
            'run.yaml:6: data.filters.bounds.mean_length: found "high" (a string)\n    allowed: a number',
        ),
        "list for a mapping of names": (
            "data: {filters: {bounds: [1]}}",
            "run.yaml:6: data.filters.bounds: found a list of 1\n    allowed: names of your own, each with a number",
        ),
        "empty name": (
            'data: {filters: {bounds: {"": 1}}}',
            "run.yaml:6: data.filters.bounds.: an empty name\n    allowed: a name that is not empty",
        ),
        "source and domains": (
            "data: {source: {kind: stdlib}, domains: {web: {source: {kind: stdlib}}}}",
            "run.yaml:6: data.domains: found a section\n"
            "    allowed: null if data.source is set (the source can be one of the domains, with data.source: null)",
        ),
        "no domain at all": (
            "data: {domains: {}}",
            "run.yaml:6: data.domains: found a section\n    allowed: at least one domain, or null",
        ),
        "more bands than values": (
            "data:\n  dedup: {bands: 20}",
            "run.yaml:7: data.dedup.bands: found 20 (an integer)\n"
            "    allowed: at most 16: data.dedup.num_perm=128 over data.dedup.rows=8",
        ),
        "classes of length out of order": (
            "data:\n  length_classes:\n  - 512\n  - 512",
            "run.yaml:9: data.length_classes[1]: found 512 (an integer)\n    allowed: above the one before it, 512",
        ),
        "curriculum that stops short": (
            "data:\n  curriculum:\n  - until: 0.4\n  - until: 0.9",
            "run.yaml:9: data.curriculum[1].until: found 0.9 (a number)\n"
            "    allowed: 1: the last stage ends with the training",
        ),
        "stages out of order": (
            "data:\n  curriculum:\n  - until: 0.4\n  - until: 0.3\n  - until: 1",
            "run.yaml:9: data.curriculum[1].until: found 0.3 (a number)\n"
            "    allowed: above 0.4, where the stage before it ends",
        ),
        "curriculum of a domain that there is not": (
            "data:\n  domains: {web: {source: {kind: stdlib}}}\n  curriculum:\n  - {until: 1, domains: {wbe: 2}}",
            "run.yaml:9: data.curriculum[0].domains.wbe: found 2 (an integer)\n"
            "    allowed: weights of data.domains: web\n"
            "    did you mean data.curriculum[0].domains.web?",
        ),
        "mixture of a domain that there is not": (
            "data:\n  domains: {web: {source: {kind: stdlib}}}\n  mixture: own\n  mixtures:\n    own: "
            "[{until: 1, domains: {wbe: 2}}]",
            "run.yaml:10: data.mixtures.own[0].domains.wbe: found 2 (an integer)\n"
            "    allowed: weights of data.domains: web\n"
            "    did you mean data.mixtures.own[0].domains.web?",
        ),
        "mixture without stages": (
            "data:\n  mixtures: {own: []}",
            "run.yaml:7: data.mixtures.own: found a list of 0\n    allowed: at least one stage",
        ),
        "mixture that there is not": (
            "data: {mixture: ballanced, mixtures: {balanced: [{until: 1}]}}",
            'run.yaml:6: data.mixture: found "ballanced" (a string)\n'
            "    allowed: one of data.mixtures: balanced, or null\n"
            "    did you mean balanced?",
        ),
        "mixture and curriculum": (
            "data: {mixture: balanced, curriculum: [{until: 1}], mixtures: {balanced: [{until: 1}]}}",
            'run.yaml:6: data.mixture: found "balanced" (a string)\n'
            "    allowed: null, since data.curriculum is set (the curriculum can be one *",
        ),
        "weights that are all 0": (
            "data:\n  curriculum:\n  - {until: 1, domains: {text: 0}}",
            "run.yaml:8: data.curriculum[0].domains: found a section\n"
            "    allowed: at least one weight above 0, or null",
        ),
        "too few weights of lengths": (
            "data:\n  length_classes: [512]\n  curriculum:\n  - {until: 1, lengths: [1]}",
            "run.yaml:9: data.curriculum[0].lengths: found a list of 1\n"
            "    allowed: a list of 2, one more than data.length_classes has bounds, or null",
        ),
        "lengths that are all 0": (
            "data:\n  curriculum:\n  - {until: 1, lengths: [0]}",
            "run.yaml:8: data.curriculum[0].lengths: found a list of 1\n"
            "    allowed: at least one weight above 0, or null",
        ),
        "negative weight": (
            "data:\n  curriculum:\n  - {until: 1, domains: {text: -1}}",
            "run.yaml:8: data.curriculum[0].domains.text: found -1 (an integer)\n    allowed: a number of at least 0",
        ),
        "fill in the middle of a domain that there is not": (
            "data:\n  objectives: {fim: {domains: [txet]}}",
            'run.yaml:7: data.objectives.fim.domains[0]: found "txet" (a string)\n'
            "    allowed: one of data.domains: text\n"
            "    did you mean text?",
        ),
        "marks that are the same": (
            "data:\n  objectives: {fim: {prefix: <a>, suffix: <a>}}",
            'run.yaml:7: data.objectives.fim.prefix: found "<a>" (a string)\n'
            "    allowed: four different tokens, with data.tokenizer.end_of_text; they are <a>, <|fim_middle|>, "
            "<a>,*",
        ),
        "a weight below 0": (
            "data: {objectives: {weights: {fim: -0.3}}}",
            "run.yaml:6: data.objectives.weights.fim: found -0.3 (a number)\n    allowed: a number of at least 0",
        ),
        "ordinary text without weight": (
            "data: {objectives: {weights: {next_token: 0}}}",
            "run.yaml:6: data.objectives.weights.next_token: found 0 (an integer)\n    allowed: a number above 0",
        ),
        "a part that there is not": (
            "data: {objectives: {weights: {cott: 0.2}}}",
            "run.yaml:6: data.objectives.weights.cott: unknown key\n"
            "    allowed: in data.objectives.weights: next_token, fim, cot\n"
            "    did you mean data.objectives.weights.cot?",
        ),
        "a mean that there is not": (
            "data: {objectives: {normalise: mean}}",
            'run.yaml:6: data.objectives.normalise: found "mean" (a string)\n'
            "    allowed: one of mean_of_tokens or sum_of_means",
        ),
        "means of parts where there are no parts": (
            "data: {objectives: {normalise: sum_of_means}}",
            'run.yaml:6: data.objectives.normalise: found "sum_of_means" (a string)\n'
            "    allowed: mean_of_tokens without data.objectives.weights: then the loss has no parts",
        ),
        "chains without weights": (
            "data: {objectives: {cot: {}}}",
            "run.yaml:6: data.objectives.cot: found a section\n"
            "    allowed: null where data.objectives.weights is missing. Set it, for example to {next_token: 1, "
            "cot: 0.2}",
        ),
        "a share above 1": (
            "data: {objectives: {weights: {}, cot: {max_share: 20}}}",
            "run.yaml:6: data.objectives.cot.max_share: found 20 (an integer)\n    allowed: a number from 0 to 1",
        ),
        "equal marks": (
            "data: {objectives: {weights: {}, cot: {begin: '|', end: '|'}}}",
            'run.yaml:6: data.objectives.cot.begin: found "|" (a string)\n'
            "    allowed: another text than data.objectives.cot.end",
        ),
        "a mark of a span": (
            "data: {objectives: {weights: {}, cot: {}, spans: [{begin: <think>, end: x, weight: 0.5}]}}",
            'run.yaml:6: data.objectives.cot.begin: found "<think>" (a string)\n'
            "    allowed: a text that begins none of data.objectives.spans: a token has one weight",
        ),
        "columns of an unknown domain": (
            "data: {source: {kind: jsonl, paths: [a]}, objectives: {weights: {}, cot: {columns: {txet: {}}}}}",
            "run.yaml:6: data.objectives.cot.columns.txet: found a section\n"
            "    allowed: one of data.domains: text\n"
            "    did you mean text?",
        ),
        "columns of a source without fields": (
            "data: {objectives: {weights: {}, cot: {columns: {text: {}}}}}",
            "run.yaml:6: data.objectives.cot.columns.text: found a section\n"
            "    allowed: domains whose source is of kind csv, huggingface, jsonl, parquet; this one is stdlib",
        ),
        "one column twice": (
            "data: {source: {kind: jsonl, paths: [a]}, objectives: {weights: {}, cot: {columns: {text: "
            "{answer: thought}}}}}",
            "run.yaml:6: data.objectives.cot.columns.text: found a section\n"
            "    allowed: three different fields; they are question, thought, thought",
        ),
        "a loss of fill in the middle that there is not": (
            "data: {objectives: {fim: {loss: suffix}}}",
            'run.yaml:6: data.objectives.fim.loss: found "suffix" (a string)\n    allowed: one of all or middle',
        ),
        "texts without characters": (
            "data: {objectives: {fim: {characters: 0}}}",
            "run.yaml:6: data.objectives.fim.characters: found 0 (an integer)\n    allowed: *",
        ),
        "a sequence with a curriculum": (
            "data: {order: sequential, curriculum: [{until: 1}]}",
            'run.yaml:6: data.order: found "sequential" (a string)\n'
            "    allowed: shuffled with data.curriculum or data.mixture, which draw rows at random",
        ),
        "training options of a tokenizer that exists": (
            "data: {tokenizer: {path: t.json, min_frequency: 2}}",
            "run.yaml:6: data.tokenizer.min_frequency: found 2 (an integer)\n"
            "    allowed: 1 for the tokenizer at data.tokenizer.path, which is not trained here",
        ),
        "a normal form of a lossless tokenizer": (
            "data: {tokenizer: {normalization: nfkc}}",
            'run.yaml:6: data.tokenizer.normalization: found "nfkc" (a string)\n'
            "    allowed: none, or data.tokenizer.lossless: false, because it changes text",
        ),
        "a token that is added twice": (
            "data: {tokenizer: {add_tokens: [<a>, <a>]}}",
            'run.yaml:6: data.tokenizer.add_tokens[1]: found "<a>" (a string)\n'
            "    allowed: a token that is neither data.tokenizer.end_of_text nor listed before",
        ),
    },
    "train": {
        "compiled and gathered": (
            Instead("  steps: 500", "  steps: 500\n  compile: true\n  zero_stage: 3"),
            "run.yaml:8: train.compile: found true (true/false)\n"
            "    allowed: false, or train.zero_stage below 3 and train.expert_parallel 1",
        ),
        "unknown key": (
            Instead("  steps: 500", "  steps: 500\n  warmup_stesp: 5"),
            "run.yaml:8: train.warmup_stesp: unknown key\n"
            "    allowed: in train: steps, batch_rows, micro_batch_rows, micro_batch_parts,*\n"
            "    did you mean train.warmup_steps?",
        ),
        "dots in a file": (
            "train.seed: 3",
            "run.yaml:6: train.seed: unknown key (in a file, sections are nested, not written with dots)\n"
            "    allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation\n"
            "    did you mean train?",
        ),
        "misspelt required key": (
            Instead("  steps: 500", "  step: 500"),
            "run.yaml:7: train.step: unknown key\n    allowed: in train: steps,*\n    did you mean train.steps?",
        ),
        "float for an integer": (
            Instead("steps: 500", "steps: 5e2"),
            "run.yaml:7: train.steps: found 500.0 (a number)\n    allowed: an integer of at least 1",
        ),
        "out of range": (
            Instead("learning_rate: 3e-3", "learning_rate: -1"),
            "run.yaml:10: train.learning_rate: found -1 (an integer)\n    allowed: a number above 0",
        ),
        "not a number": (
            Instead("learning_rate: 3e-3", "learning_rate: .nan"),
            "run.yaml:10: train.learning_rate: found NaN (a number)\n    allowed: a number above 0",
        ),
        "integer of many digits": (
            Instead("steps: 500", f"steps: 1{5000 * '0'}"),
            "run.yaml:7: train.steps: an integer of more than 64 bits\n    allowed: an integer that fits in 64 bits",
        ),
        "unknown choice": (
            Instead("steps: 500", "precision: bf61\n  steps: 500"),
            'run.yaml:7: train.precision: found "bf61" (a string)\n'
            "    allowed: one of fp32, bf16 or fp16\n"
            "    did you mean bf16?",
        ),
        "list too short": (
            Instead("steps: 500", "betas: [0.9]\n  steps: 500"),
            "run.yaml:7: train.betas: found a list of 1\n"
            "    allowed: a list of 2, each a number of at least 0 and below 1",
        ),
        "item of a list": (
            Instead("steps: 500", "betas:\n  - 0.9\n  - 1.5\n  steps: 500"),
            "run.yaml:9: train.betas[1]: found 1.5 (a number)\n    allowed: a number of at least 0 and below 1",
        ),
        "missing key": (
            Instead("  batch_rows: 8\n", ""),
            "run.yaml:6: train.batch_rows: missing, and it has no default\n"
            "    allowed: an integer of at least 1\n"
            "    meaning: Rows of one optimizer step (global batch), over all processes.",
        ),
        "batch that micro-batches do not fill": (
            Instead("batch_rows: 8", "batch_rows: 12"),
            "run.yaml:8: train.batch_rows: found 12 (an integer)\n    allowed: a multiple of train.micro_batch_rows=8",
        ),
        "warmup longer than the run": (
            Instead("steps: 500", "steps: 500\n  warmup_steps: 500"),
            "run.yaml:8: train.warmup_steps: found 500 (an integer)\n    allowed: below train.steps=500",
        ),
        "fp16 on a CPU": (
            Instead("train:", "run: {device: cpu}\ntrain:\n  precision: fp16"),
            'run.yaml:8: train.precision: found "fp16" (a string)\n'
            "    allowed: bf16 or fp32 with run.device=cpu; fp16 needs a GPU",
        ),
        "a bfloat16 stream with other products": (
            Instead("train:", "train:\n  precision: fp32\n  residual_dtype: bf16"),
            'run.yaml:8: train.residual_dtype: found "bf16" (a string)\n'
            "    allowed: fp32 or null, or train.precision: bf16",
        ),
        "key written twice": (
            Instead("  steps: 500", "  steps: 500\n  steps: 600"),
            "run.yaml:8: train.steps: written twice, first at run.yaml:7\n    allowed: each key once",
        ),
        "mixers that skip tokens, compiled": (
            Instead("train:", "  depth: {part: mixer}\ntrain:\n  compile: true"),
            "run.yaml:8: train.compile: found true (true/false)\n"
            "    allowed: false with model.depth.part mixer or both: mixers read as many rows as tokens are kept",
        ),
        "a rate of the head, which is the embedding": (
            Instead("train:", "train:\n  groups: {head: {rate: 3.0}}"),
            "run.yaml:7: train.groups.head: found a section\n"
            "    allowed: no group head with model.tie_embeddings: true; the table is in the group embedding",
        ),
        "bfloat16 weights of a model of cdrmix": (
            Overrides(GOOD, "train.weights=bf16", "train.zero_stage=2"),
            "command line ('train.weights=bf16'): train.weights: found \"bf16\" (a string)\n"
            "    allowed: fp32, for a model of cdrmix: its norms and routers need float32 weights",
        ),
        "bfloat16 weights without ZeRO, or in fp16": (
            [
                Overrides(LLAMA, "train.weights=bf16"),
                Overrides(LLAMA, "train.weights=bf16", "train.zero_stage=auto", "train.precision=fp16"),
            ],
            "command line ('train.weights=bf16'): train.weights: found \"bf16\" (a string)\n"
            "    allowed: fp32, or train.precision: bf16 and train.zero_stage: auto, 1, 2 or 3",
        ),
        "offloading without ZeRO, in stage 1, or with expert parallelism": (
            [
                Overrides(GOOD, "train.offload=optimizer"),
                Overrides(GOOD, "train.offload=optimizer", "train.zero_stage=1"),
                Overrides(GOOD, "train.offload=optimizer", "train.zero_stage=2", "train.expert_parallel=2"),
            ],
            "command line ('train.offload=optimizer'): train.offload: found \"optimizer\" (a string)\n"
            "    allowed: none, or train.zero_stage: auto, 2 or 3 and train.expert_parallel: 1",
        ),
        "all offloaded in stage 2": (
            Overrides(GOOD, "train.offload=all", "train.zero_stage=2"),
            "command line ('train.offload=all'): train.offload: found \"all\" (a string)\n"
            "    allowed: none, or train.zero_stage: auto or 3 and train.expert_parallel: 1",
        ),
        "all offloaded and compiled": (
            Overrides(GOOD, "train.offload=all", "train.zero_stage=auto", "train.compile=true"),
            "command line ('train.compile=true'): train.compile: found true (true/false)\n"
            "    allowed: false, or train.zero_stage below 3 and train.offload none or optimizer and "
            "train.expert_parallel 1",
        ),
        "a folder of nothing offloaded": (
            Overrides(GOOD, "train.offload_folder=state"),
            "command line ('train.offload_folder=state'): train.offload_folder: found \"state\" (a string)\n"
            "    allowed: null, or train.offload: optimizer or all and train.optimizer: adamw",
        ),
    },
    "export": {
        "depths to keep where there are none": (
            "export: {prediction_heads: keep}",
            'run.yaml:6: export.prediction_heads: found "keep" (a string)\n    allowed: drop without model.prediction',
        ),
        "an export of cdrmix in bfloat16": (
            Overrides(GOOD, "export.weights=bf16"),
            "command line ('export.weights=bf16'): export.weights: found \"bf16\" (a string)\n"
            "    allowed: fp32, for a model of cdrmix",
        ),
        "an adapter of cdrmix": (
            Overrides(GOOD, "export.lora=adapter"),
            "command line ('export.lora=adapter'): export.lora: found \"adapter\" (a string)\n"
            "    allowed: merge, for a model of cdrmix",
        ),
        "an adapter without LoRA": (
            Overrides(LLAMA, "export.lora=adapter"),
            "command line ('export.lora=adapter'): export.lora: found \"adapter\" (a string)\n"
            "    allowed: merge, without model.lora",
        ),
        "an adapter in bfloat16": (
            Overrides(LORA, "export.weights=bf16", "export.lora=adapter"),
            "command line ('export.weights=bf16'): export.weights: found \"bf16\" (a string)\n"
            "    allowed: fp32, or export.lora: merge; adapters alone are exported in float32",
        ),
    },
    "reasoning": {
        "reasoning without a size": (
            "reasoning: {plastic_lora: {rank: 4, alpha: 0.2, decay: 0.9}, memory: {dim: 8, top_k: 1, "
            "max_tokens: 8}, controller: {step_budget: 4, max_branches: 1}}",
            "run.yaml:6: reasoning.rl: missing, and it has no default\n"
            "    allowed: a section with the keys * (required: *); or set model.size (1b, 4b, 40b, 200b), which "
            "sets it",
        ),
        "reasoning left empty": (
            "reasoning:",
            "run.yaml:6: reasoning: found a section without keys\n"
            "    allowed: {} for parameters by model.size, a section with keys, or null for a core run",
        ),
        "rollouts of a copy under expert parallelism": (
            Instead("train:", REASONING + ", rollout_weights: copied}\ntrain:\n  expert_parallel: 2"),
            'run.yaml:6: reasoning.rollout_weights: found "copied" (a string)\n'
            "    allowed: sharded with train.expert_parallel=2, whose processes need one another in every pass",
        ),
        "a phase that replays itself": (
            REASONING + ", phases: {imitation: {replay: [text, imitation]}}}",
            'run.yaml:6: reasoning.phases.imitation.replay[1]: found "imitation" (a string)\n'
            "    allowed: another phase than its own",
        ),
        "documents in token ids": (
            REASONING + ", agent: {tokens: true, data: {kind: jsonl, paths: [a]}}}",
            "run.yaml:6: reasoning.agent.tokens: found true (true/false)\n"
            "    allowed: false with a section reasoning.agent.data, whose documents are text",
        ),
        "a decay without a step in the shortest phase": (
            Overrides(TINY, "train.schedule={kind: wsd, decay: 0.03}"),
            "command line ('train.schedule={kind: wsd, decay: 0.03}'): train.schedule.decay: found 0.03 (a number)\n"
            "    allowed: above 0.05 with reasoning.phases.operations.steps=10: a shorter decay has no step, and the "
            "rate would not decay",
        ),
        "own without adapters, or without adapters of layers": (
            [
                Overrides(TINY, "reasoning.phases.plasticity.train=own", f"reasoning.plastic_lora.{none}")
                for none in ("enabled=false", "rwkv7=[]")
            ],
            "*/cdrmix-reason-tiny.yaml:*: reasoning.phases.acceptance.steps: found 20 (an integer)\n"
            "    allowed: 0 without reasoning.controller.enabled and adapters of reasoning.plastic_lora: there "
            "is nothing to accept\n"
            "command line ('reasoning.phases.plasticity.train=own'): reasoning.phases.plasticity.train: found "
            '"own" (a string)\n'
            "    allowed: all: reasoning.plastic_lora has no adapters, which are all that own trains",
        ),
        "acceptance that trains all": (
            Overrides(TINY, "reasoning.phases.acceptance.train=all"),
            "*/cdrmix-reason-tiny.yaml:*: reasoning.phases.acceptance.steps: found 20 (an integer)\n"
            "    allowed: 0 with reasoning.phases.acceptance.train: all: the phase trains the controller's heads alone",
        ),
        "acceptance without a controller, or without adapters": (
            [Overrides(TINY, "reasoning.controller.enabled=false"), Overrides(TINY, "reasoning.plastic_lora.rwkv7=[]")],
            "*/cdrmix-reason-tiny.yaml:*: reasoning.phases.acceptance.steps: found 20 (an integer)\n"
            "    allowed: 0 without reasoning.controller.enabled and adapters of reasoning.plastic_lora: there "
            "is nothing to accept",
        ),
        "a horizon below the chunks": (
            Overrides(TINY, "reasoning.phases.policy.steps=1", "reasoning.rl.horizon=3"),
            "command line ('reasoning.rl.horizon=3'): reasoning.rl.horizon: found 3 (an integer)\n"
            "    allowed: at least 4, the chunks of an episode and its answer\n"
            "command line ('reasoning.rl.horizon=3'): reasoning.rl.horizon: found 3 (an integer)\n"
            "    allowed: at least 5, the chunks of an episode and its answer",
        ),
        "a horizon below the chunks of the policy": (
            Overrides(TINY, "reasoning.phases.policy={steps: 1, chunks: 8}", "reasoning.rl.horizon=8"),
            "command line ('reasoning.rl.horizon=8'): reasoning.rl.horizon: found 8 (an integer)\n"
            "    allowed: at least 9, the chunks of an episode and its answer",
        ),
        "a horizon below the chunks of operations": (
            Overrides(TINY, "reasoning.operations.chunks=9", "reasoning.rl.horizon=9"),
            "command line ('reasoning.rl.horizon=9'): reasoning.rl.horizon: found 9 (an integer)\n"
            "    allowed: at least 10, the chunks of an episode and its answer",
        ),
        "heads that do not divide the memory": (
            Overrides(TINY, "reasoning.memory.tokens=8", "reasoning.memory.heads=3"),
            "command line ('reasoning.memory.heads=3'): reasoning.memory.heads: found 3 (an integer)\n"
            "    allowed: a divisor of reasoning.memory.tokens=8",
        ),
        "an index below a chunk, also in replay alone": (
            [
                Overrides(TINY, "reasoning.memory.max_tokens=16"),
                Overrides(
                    TINY,
                    "reasoning.memory.max_tokens=16",
                    "reasoning.phases.operations.steps=0",
                    "reasoning.phases.operations_imitation.steps=0",
                    "reasoning.phases.plasticity.replay=[operations_imitation]",
                ),
            ],
            "command line ('reasoning.memory.max_tokens=16'): reasoning.memory.max_tokens: found 16 (an integer)\n"
            "    allowed: at least reasoning.chunk=32, which is an episode of the index",
        ),
    },
}

ACCEPTED = {
    "bfloat16 weights, and the stage that follows": Overrides(LLAMA, "train.weights=bf16", "train.zero_stage=auto"),
    "bfloat16 weights in stage 1": Overrides(LLAMA, "train.weights=bf16", "train.zero_stage=1"),
    "bfloat16 weights, all offloaded to a folder": Overrides(
        LLAMA, "train.weights=bf16", "train.zero_stage=3", "train.offload=all", "train.offload_folder=state"
    ),
    "the optimizer's state in a folder, compiled": Overrides(
        GOOD, "train.offload=optimizer", "train.zero_stage=2", "train.offload_folder=state", "train.compile=true"
    ),
    "the optimizer's state offloaded in stage 3": Overrides(GOOD, "train.offload=optimizer", "train.zero_stage=3"),
    "all offloaded, in the stage that follows": Overrides(GOOD, "train.offload=all", "train.zero_stage=auto"),
    "quantized weights, the optimizer's state offloaded": Overrides(
        LORA, "train.zero_stage=auto", "train.offload=optimizer"
    ),
    "merged adapters in bfloat16": Overrides(LORA, "export.weights=bf16"),
    "adapters alone": Overrides(LORA, "export.lora=adapter"),
    "no adapters, and no phase of theirs": Overrides(
        TINY, "reasoning.plastic_lora.enabled=false", "reasoning.phases.acceptance.steps=0"
    ),
    "own without adapters, in a phase without steps": Overrides(
        TINY,
        "reasoning.phases.plasticity.train=own",
        "reasoning.plastic_lora.enabled=false",
        "reasoning.phases.plasticity.steps=0",
        "reasoning.phases.acceptance.steps=0",
    ),
    "an index below a chunk, and no phase of it": Overrides(
        TINY,
        "reasoning.memory.max_tokens=16",
        "reasoning.phases.operations.steps=0",
        "reasoning.phases.operations_imitation.steps=0",
    ),
    "a horizon below the chunks, and no phase that reads it": Overrides(
        TINY, "reasoning.rl.horizon=3", "reasoning.phases.policy.steps=0", "reasoning.phases.operations.steps=0"
    ),
}


def complaint(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The message about a file `run.yaml`, with the folder's name taken out."""
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


def made(change: Change) -> tuple[str, Sequence[str]]:
    """The text of the file and the overrides."""
    match change:
        case Overrides():
            return change.text, change.settings
        case Instead(old, new):
            assert old in GOOD
            return GOOD.replace(old, new, 1), ()
        case _:
            return GOOD.replace("train:", f"{change}\ntrain:", 1), ()


def filled_in(expected: str, said: str) -> str:
    """`expected` behind its headline, with what was said in place of each `*`, if that is the only difference."""
    count = sum(not line.startswith(" ") for line in expected.splitlines())
    whole = f"the configuration has {'one problem' if count == 1 else f'{count} problems'}:\n{expected}"
    return said if re.fullmatch(".*".join(map(re.escape, whole.split("*"))), said) else whole


@pytest.mark.parametrize("section", PROBLEMS)
def test_what_is_said(section: str, tmp_path: Path) -> None:
    found, wanted = {}, {}
    for name, (changes, expected) in PROBLEMS[section].items():
        cases = [made(change) for change in (changes if isinstance(changes, list) else [changes])]
        found[name] = [complaint(tmp_path, text, *overrides) for text, overrides in cases]
        wanted[name] = [filled_in(expected, said) for said in found[name]]
    assert found == wanted


def test_what_the_others_are_broken_from_and_what_is_near_them_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, settings in ((GOOD, ()), (LLAMA, ()), (LORA, ()), (TINY, ()), *map(made, ACCEPTED.values())):
        path.write_text(text)
        Config.from_yaml(path, settings)
    path.write_text(GOOD)
    assert Config.from_yaml(path).train.learning_rate == 3e-3
    path.write_text(TINY)
    assert Config.from_yaml(path, ["model.depth={}"]).model.skipping == ("0", "1", "2", "3")


def test_every_size_of_a_model_has_a_bound(tmp_path: Path) -> None:
    """A slip such as a thousand layers too many is refused at once, and not planned for minutes."""
    path = tmp_path / "run.yaml"
    path.write_text(TINY)
    sizes = ["model.feed_forward.dense_hidden", "model.feed_forward.shared_hidden"]  # null by default

    def collect(section: dict[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict):
                collect(value, f"{prefix}{key}.")
            elif type(value) is int:
                sizes.append(f"{prefix}{key}")

    collect(Config.from_yaml(path).model.model_dump(), "model.")
    assert len(sizes) > 15
    for key in sizes:
        with pytest.raises(ConfigError, match=rf"{key}: found 100000000000 "):
            Config.from_yaml(path, [f"{key}=100000000000"])


def test_every_problem_at_once(tmp_path: Path) -> None:
    """But for conflicts of keys that are valid by themselves, of which there are three here: they follow."""
    (tmp_path / "base.yaml").write_text("train:\n  betas: 3\n")
    said = complaint(
        tmp_path,
        """\
        base: base.yaml
        model:
          d_model: 130
          layers: many
          attention: {heads: 4, hads: 1}
          feed_forward: {hidden: 256}
        trian: {}
        train: {steps: 10, steps: 20, batch_rows: 3, micro_batch_rows: 2}
        """,
        "run.seed=-1",
        "steps",
        "data.row_length={a",
    )
    heads = [line for line in said.splitlines() if not line.startswith(" ")]
    assert heads[0] == "the configuration has 9 problems:"
    assert [tuple(head.split(": ")[:2]) for head in heads[1:-3]] == [
        ("base.yaml:2", "train.betas"),
        ("run.yaml:4", "model.layers"),
        ("run.yaml:5", "model.attention.hads"),
        ("run.yaml:7", "trian"),
        ("run.yaml:8", "train.learning_rate"),
        ("run.yaml:8", "train.steps"),
    ]
    assert heads[-3:] == [
        "command line ('data.row_length={a'): data.row_length: not valid YAML: while parsing a flow mapping, "
        "expected ',' or '}', but got '<stream end>'",
        "command line ('run.seed=-1'): run.seed: found -1 (an integer)",
        "command line ('steps'): not an override",
    ]


def test_conflicts_follow_once_every_key_is_valid_by_itself(tmp_path: Path) -> None:
    said = complaint(
        tmp_path,
        """\
        model:
          d_model: 130
          layers: 2
          attention: {heads: 4}
          feed_forward: {hidden: 256}
        train: {steps: 20, learning_rate: 0.1, batch_rows: 3, micro_batch_rows: 2}
        """,
    )
    assert [tuple(line.split(": ")[:2]) for line in said.splitlines()[1:] if not line.startswith(" ")] == [
        ("run.yaml:2", "model.rwkv.head_size"),
        ("run.yaml:4", "model.attention.heads"),
        ("run.yaml:6", "train.batch_rows"),
    ]


# (the bytes of a file, how its only problem begins)
NO_CONFIGURATION = [
    (b"", "run.yaml:1: the file is empty"),
    (b"# only a comment\n", "run.yaml:1: the file is empty"),
    (b"- a\n- b\n", "run.yaml:1: found a list at the top of the file"),
    (b"just words", "run.yaml:1: found a single value at the top of the file"),
    (b"null\n", "run.yaml:1: found a single value at the top of the file"),
    (b"\x7fELF\x00\x01", "run.yaml:1: a binary file, not YAML"),
    (b"run:\n  name: \xff\n", "run.yaml:2: the byte 0xff is not UTF-8"),
    (b"run:\n  name: \x07\n", "run.yaml:2: not valid YAML: the character U+0007"),
    (b"run: {}\n---\nrun: {}\n", "run.yaml:2: not valid YAML: expected a single document"),
    (b"run:\n\tname: x\n", "run.yaml:2: not valid YAML: while scanning for the next token, found character tab that"),
    (b"run: *nowhere\n", "run.yaml:1: not valid YAML: found undefined alias a word"),
    (b"run: " + b"[" * 5000, "run.yaml:1: nested too deep"),
    (b"run: " + b"[" * 60 + b"]" * 60, "run.yaml:1: too many values, or nested too deep"),
    (b"run: &a [*a]\n", "run.yaml:1: too many values, or nested too deep"),
    (b"#" * (1 << 20) + b"\n", "run.yaml:1: too large for a configuration"),
]


def test_what_is_no_configuration_at_all(tmp_path: Path) -> None:
    for content, expected in NO_CONFIGURATION:
        headline, problem, *_ = complaint(tmp_path, content).splitlines()
        assert headline == "the configuration has one problem:", expected
        assert problem.startswith(expected)


def test_aliases_of_aliases_are_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]  # 10^12 strings
    assert "run.yaml:1: too many values" in complaint(tmp_path, "\n".join(lines))


def test_an_override_nested_without_end(tmp_path: Path) -> None:
    assert ": nested too deep" in complaint(tmp_path, GOOD, "a" + ".a" * 5000 + "=1")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    said = complaint(
        tmp_path, GOOD + 'run: {"\\e[2J\\nrun.yaml:1: fake": "\\e[31m"}\n', "run.name=[\x1b]", "run.\udcff=1"
    )
    assert "\x1b" not in said
    assert "\nrun.yaml:1:" not in said
    assert "run.\\x1b[2J\\nrun.yaml:1: fake: unknown key" in said
    said.encode()  # undecodable bytes of the command line are shown escaped


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(tmp_path / "tinny.yaml", ["train.steps=x"])
    _, *said = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    # What else is missing cannot be known, but the override is wrong in any case.
    assert said == [
        "tinny.yaml: no such file",
        "    did you mean tiny.yaml?",
        "command line ('train.steps=x'): train.steps: found \"x\" (a string)",
        "    allowed: an integer of at least 1",
    ]


@pytest.mark.parametrize("name", [".", "nul\0l", "a" * 5000, "file/below"])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="the configuration has one problem"):
        Config.from_yaml(f"{tmp_path}/{name}")


def test_every_layer_has_the_mixer_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    model = Config.from_yaml(path).model
    assert model.mixers == ("rwkv7", "rwkv7", "rwkv7", "attention")
    assert model.routers == ("0", "1", "2", "3")
    listed = "model.mixer_layers={mamba2: [3], routing_mamba: [1, 0], attention: [2]}"
    model = Config.from_yaml(path, [listed]).model
    assert model.mixers == ("routing_mamba", "routing_mamba", "attention", "mamba2")
    assert model.routers == ("0.mixer", "0", "1.mixer", "1", "2", "3")
    dense = Config.from_yaml(path, [listed, "model.feed_forward.dense_layers=[0, 3]", "model.depth={}"]).model
    assert dense.routers == ("0.mixer", "1.mixer", "1", "2")
    assert dense.feed_forwards == ("dense", "moe", "moe", "dense")
    assert dense.skipping == ("0", "1", "2", "3")
    assert Config.from_yaml(path, [listed, "model.feed_forward.kind=channel_mix"]).model.routers == (
        "0.mixer",
        "1.mixer",
    )


def test_weights_of_parts_are_not_for_preferences(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    data = "data: {source: {kind: preferences, paths: [a], template: chatml}, objectives: {weights: {}}}"
    path.write_text(GOOD.replace("train:", f"{data}\ntrain:\n  dpo: {{}}"))
    with pytest.raises(ConfigError, match=r"run.yaml:6: data.objectives.weights: .*\n.*null with train.dpo"):
        Config.from_yaml(path)


def test_added_tokens_of_a_model_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    model = "model: {kind: huggingface, path: absent}\ndata: {tokenizer: {path: model, add_tokens: [<a>]}}\n"
    path.write_text(model + LLAMA.splitlines()[-1])
    with pytest.raises(ConfigError, match=r"run.yaml:2: data.tokenizer.add_tokens: .*\n.*model.vocab.add_tokens adds"):
        Config.from_yaml(path)
