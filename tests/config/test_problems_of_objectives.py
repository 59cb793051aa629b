"""What is said about wrong objectives: parts and weights, chains of thought, the order of rows, tokens for them."""

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
data: {}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""
SOURCE = "source: {kind: jsonl, paths: [a]}"

# (the section data, the whole message after the headline; * is any text)
BROKEN = {
    "a weight below 0": (
        "data: {objectives: {weights: {fim: -0.3}}}",
        """\
        run.yaml:6: data.objectives.weights.fim: found -0.3 (a number)
            allowed: a number of at least 0""",
    ),
    "ordinary text without weight": (
        "data: {objectives: {weights: {next_token: 0}}}",
        """\
        run.yaml:6: data.objectives.weights.next_token: found 0 (an integer)
            allowed: a number above 0""",
    ),
    "a part that there is not": (
        "data: {objectives: {weights: {cott: 0.2}}}",
        """\
        run.yaml:6: data.objectives.weights.cott: unknown key
            allowed: in data.objectives.weights: next_token, fim, cot
            did you mean data.objectives.weights.cot?""",
    ),
    "a mean that there is not": (
        "data: {objectives: {normalise: mean}}",
        """\
        run.yaml:6: data.objectives.normalise: found "mean" (a string)
            allowed: one of mean_of_tokens or sum_of_means""",
    ),
    "means of parts where there are no parts": (
        "data: {objectives: {normalise: sum_of_means}}",
        """\
        run.yaml:6: data.objectives.normalise: found "sum_of_means" (a string)
            allowed: mean_of_tokens without data.objectives.weights: then the loss has no parts""",
    ),
    "chains without weights": (
        "data: {objectives: {cot: {}}}",
        """\
        run.yaml:6: data.objectives.cot: found a section
            allowed: null where data.objectives.weights is missing. Set it, for example to {next_token: 1, cot: 0.2}""",
    ),
    "a share above 1": (
        "data: {objectives: {weights: {}, cot: {max_share: 20}}}",
        """\
        run.yaml:6: data.objectives.cot.max_share: found 20 (an integer)
            allowed: a number from 0 to 1""",
    ),
    "equal marks": (
        "data: {objectives: {weights: {}, cot: {begin: '|', end: '|'}}}",
        """\
        run.yaml:6: data.objectives.cot.begin: found "|" (a string)
            allowed: another text than data.objectives.cot.end""",
    ),
    "a mark of a span": (
        "data: {objectives: {weights: {}, cot: {}, spans: [{begin: <think>, end: x, weight: 0.5}]}}",
        """\
        run.yaml:6: data.objectives.cot.begin: found "<think>" (a string)
            allowed: a text that begins none of data.objectives.spans: a token has one weight""",
    ),
    "columns of an unknown domain": (
        f"data: {{{SOURCE}, objectives: {{weights: {{}}, cot: {{columns: {{txet: {{}}}}}}}}}}",
        """\
        run.yaml:6: data.objectives.cot.columns.txet: found a section
            allowed: one of data.domains: text
            did you mean text?""",
    ),
    "columns of a source without fields": (
        "data: {objectives: {weights: {}, cot: {columns: {text: {}}}}}",
        """\
        run.yaml:6: data.objectives.cot.columns.text: found a section
            allowed: domains whose source is of kind csv, huggingface, jsonl, parquet; this one is stdlib""",
    ),
    "one column twice": (
        f"data: {{{SOURCE}, objectives: {{weights: {{}}, cot: {{columns: {{text: {{answer: thought}}}}}}}}}}",
        """\
        run.yaml:6: data.objectives.cot.columns.text: found a section
            allowed: three different fields; they are question, thought, thought""",
    ),
    "a loss of fill in the middle that there is not": (
        "data: {objectives: {fim: {loss: suffix}}}",
        """\
        run.yaml:6: data.objectives.fim.loss: found "suffix" (a string)
            allowed: one of all or middle""",
    ),
    "texts without characters": (
        "data: {objectives: {fim: {characters: 0}}}",
        """\
        run.yaml:6: data.objectives.fim.characters: found 0 (an integer)
            allowed: *""",
    ),
    "a sequence with a curriculum": (
        "data: {order: sequential, curriculum: [{until: 1}]}",
        """\
        run.yaml:6: data.order: found "sequential" (a string)
            allowed: shuffled with data.curriculum or data.mixture, which draw rows at random""",
    ),
    "training options of a tokenizer that exists": (
        "data: {tokenizer: {path: t.json, min_frequency: 2}}",
        """\
        run.yaml:6: data.tokenizer.min_frequency: found 2 (an integer)
            allowed: 1 for the tokenizer at data.tokenizer.path, which is not trained here""",
    ),
    "a normal form of a lossless tokenizer": (
        "data: {tokenizer: {normalization: nfkc}}",
        """\
        run.yaml:6: data.tokenizer.normalization: found "nfkc" (a string)
            allowed: none, or data.tokenizer.lossless: false, because it changes text""",
    ),
    "a token that is added twice": (
        "data: {tokenizer: {add_tokens: [<a>, <a>]}}",
        """\
        run.yaml:6: data.tokenizer.add_tokens[1]: found "<a>" (a string)
            allowed: a token that is neither data.tokenizer.end_of_text nor listed before""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    new, expected = BROKEN[name]
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    Config.from_yaml(path)
    path.write_text(GOOD.replace("data: {}", new, 1))
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


def test_weights_of_parts_are_not_for_preferences(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    data = "data: {source: {kind: preferences, paths: [a], template: chatml}, objectives: {weights: {}}}"
    path.write_text(GOOD.replace("data: {}", data).replace("train: {", "train: {dpo: {}, "))
    with pytest.raises(ConfigError, match=r"run.yaml:6: data.objectives.weights: .*\n.*null with train.dpo"):
        Config.from_yaml(path)


def test_added_tokens_of_a_model_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    model = "model: {kind: huggingface, path: absent}\ndata: {tokenizer: {path: model, add_tokens: [<a>]}}\n"
    path.write_text(model + GOOD.splitlines()[-1])
    with pytest.raises(ConfigError, match=r"run.yaml:2: data.tokenizer.add_tokens: .*\n.*model.vocab.add_tokens adds"):
        Config.from_yaml(path)
