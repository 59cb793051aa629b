"""What is said about a broken mixture: domains, bounds, curriculum, objectives, near-duplicates."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

# Lines are counted from here in the tests below.
GOOD = """\
model:
  d_model: 128
  layers: 4
  attention: {heads: 4}
  feed_forward: {hidden: 256}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""

# (what is replaced, by what, the whole message after the headline; * is any text)
BROKEN = {
    "unknown key of a domain": (
        "train:",
        "data: {domains: {web: {source: {kind: text, paths: [a]}, prority: 2}}}\ntrain:",
        """\
        run.yaml:6: data.domains.web.prority: unknown key
            allowed: in data.domains.web: source, priority,*
            did you mean data.domains.web.priority?""",
    ),
    "unknown kind of a domain's source": (
        "train:",
        "data: {domains: {web: {source: {kind: jsnl, paths: [a]}}}}\ntrain:",
        """\
        run.yaml:6: data.domains.web.source.kind: found "jsnl" (a string)
            allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or text
            did you mean jsonl?""",
    ),
    "key of another kind in a domain": (
        "train:",
        "data: {domains: {web: {source: {kind: text, paths: [a], text_field: b}}}}\ntrain:",
        """\
        run.yaml:6: data.domains.web.source.text_field: not a key of kind=text, but of csv, huggingface, jsonl, parquet
            allowed: in data.domains.web.source: kind, paths""",
    ),
    "domain without a source": (
        "train:",
        "data: {domains: {web: {priority: 2}}}\ntrain:",
        """\
        run.yaml:6: data.domains.web.source: missing, and it has no default
            allowed: a section whose kind is one of chat,*
            meaning: Where the text comes from.""",
    ),
    "string for a bound": (
        "train:",
        "data: {filters: {bounds: {mean_length: high}}}\ntrain:",
        """\
        run.yaml:6: data.filters.bounds.mean_length: found "high" (a string)
            allowed: a number""",
    ),
    "list for a mapping of names": (
        "train:",
        "data: {filters: {bounds: [1]}}\ntrain:",
        """\
        run.yaml:6: data.filters.bounds: found a list of 1
            allowed: names of your own, each with a number""",
    ),
    "empty name": (
        "train:",
        'data: {filters: {bounds: {"": 1}}}\ntrain:',
        """\
        run.yaml:6: data.filters.bounds.: an empty name
            allowed: a name that is not empty""",
    ),
    "source and domains": (
        "train:",
        "data: {source: {kind: stdlib}, domains: {web: {source: {kind: stdlib}}}}\ntrain:",
        """\
        run.yaml:6: data.domains: found a section
            allowed: null if data.source is set (the source can be one of the domains, with data.source: null)""",
    ),
    "no domain at all": (
        "train:",
        "data: {domains: {}}\ntrain:",
        """\
        run.yaml:6: data.domains: found a section
            allowed: at least one domain, or null""",
    ),
    "more bands than values": (
        "train:",
        "data:\n  dedup: {bands: 20}\ntrain:",
        """\
        run.yaml:7: data.dedup.bands: found 20 (an integer)
            allowed: at most 16: data.dedup.num_perm=128 over data.dedup.rows=8""",
    ),
    "classes of length out of order": (
        "train:",
        "data:\n  length_classes:\n  - 512\n  - 512\ntrain:",
        """\
        run.yaml:9: data.length_classes[1]: found 512 (an integer)
            allowed: above the one before it, 512""",
    ),
    "curriculum that stops short": (
        "train:",
        "data:\n  curriculum:\n  - until: 0.4\n  - until: 0.9\ntrain:",
        """\
        run.yaml:9: data.curriculum[1].until: found 0.9 (a number)
            allowed: 1: the last stage ends with the training""",
    ),
    "stages out of order": (
        "train:",
        "data:\n  curriculum:\n  - until: 0.4\n  - until: 0.3\n  - until: 1\ntrain:",
        """\
        run.yaml:9: data.curriculum[1].until: found 0.3 (a number)
            allowed: above 0.4, where the stage before it ends""",
    ),
    "curriculum of a domain that there is not": (
        "train:",
        "data:\n  domains: {web: {source: {kind: stdlib}}}\n  curriculum:\n  - {until: 1, domains: {wbe: 2}}\ntrain:",
        """\
        run.yaml:9: data.curriculum[0].domains.wbe: found 2 (an integer)
            allowed: weights of data.domains: web
            did you mean data.curriculum[0].domains.web?""",
    ),
    "mixture of a domain that there is not": (
        "train:",
        "data:\n  domains: {web: {source: {kind: stdlib}}}\n"
        "  mixture: own\n  mixtures:\n    own: [{until: 1, domains: {wbe: 2}}]\ntrain:",
        """\
        run.yaml:10: data.mixtures.own[0].domains.wbe: found 2 (an integer)
            allowed: weights of data.domains: web
            did you mean data.mixtures.own[0].domains.web?""",
    ),
    "mixture without stages": (
        "train:",
        "data:\n  mixtures: {own: []}\ntrain:",
        """\
        run.yaml:7: data.mixtures.own: found a list of 0
            allowed: at least one stage""",
    ),
    "mixture that there is not": (
        "train:",
        "data: {mixture: ballanced, mixtures: {balanced: [{until: 1}]}}\ntrain:",
        """\
        run.yaml:6: data.mixture: found "ballanced" (a string)
            allowed: one of data.mixtures: balanced, or null
            did you mean balanced?""",
    ),
    "mixture and curriculum": (
        "train:",
        "data: {mixture: balanced, curriculum: [{until: 1}], mixtures: {balanced: [{until: 1}]}}\ntrain:",
        """\
        run.yaml:6: data.mixture: found "balanced" (a string)
            allowed: null, since data.curriculum is set (the curriculum can be one *""",
    ),
    "weights that are all 0": (
        "train:",
        "data:\n  curriculum:\n  - {until: 1, domains: {text: 0}}\ntrain:",
        """\
        run.yaml:8: data.curriculum[0].domains: found a section
            allowed: at least one weight above 0, or null""",
    ),
    "too few weights of lengths": (
        "train:",
        "data:\n  length_classes: [512]\n  curriculum:\n  - {until: 1, lengths: [1]}\ntrain:",
        """\
        run.yaml:9: data.curriculum[0].lengths: found a list of 1
            allowed: a list of 2, one more than data.length_classes has bounds, or null""",
    ),
    "lengths that are all 0": (
        "train:",
        "data:\n  curriculum:\n  - {until: 1, lengths: [0]}\ntrain:",
        """\
        run.yaml:8: data.curriculum[0].lengths: found a list of 1
            allowed: at least one weight above 0, or null""",
    ),
    "negative weight": (
        "train:",
        "data:\n  curriculum:\n  - {until: 1, domains: {text: -1}}\ntrain:",
        """\
        run.yaml:8: data.curriculum[0].domains.text: found -1 (an integer)
            allowed: a number of at least 0""",
    ),
    "fill in the middle of a domain that there is not": (
        "train:",
        "data:\n  objectives: {fim: {domains: [txet]}}\ntrain:",
        """\
        run.yaml:7: data.objectives.fim.domains[0]: found "txet" (a string)
            allowed: one of data.domains: text
            did you mean text?""",
    ),
    "marks that are the same": (
        "train:",
        "data:\n  objectives: {fim: {prefix: <a>, suffix: <a>}}\ntrain:",
        """\
        run.yaml:7: data.objectives.fim.prefix: found "<a>" (a string)
            allowed: four different tokens, with data.tokenizer.end_of_text; they are <a>, <|fim_middle|>, <a>,*""",
    ),
    "vocabulary too small for the marks": (
        "model:",
        "data: {objectives: {fim: {}}}\nmodel:\n  vocab_size: 259",
        """\
        run.yaml:3: model.vocab_size: found 259 (an integer)
            allowed: at least 260 for a tokenizer *end-of-text token, and the three marks of data.objectives.fim""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    old, new, expected = BROKEN[name]
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    Config.from_yaml(path)
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    headline, *said = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert headline == "the configuration has one problem:"
    wanted = dedent(expected).splitlines()
    assert len(said) == len(wanted), "\n".join(said)
    for line, pattern in zip(said, wanted, strict=True):
        pieces = pattern.split("*")
        assert line.startswith(pieces[0]), line
        assert line.endswith(pieces[-1]), line
        assert all(piece in line for piece in pieces), line
