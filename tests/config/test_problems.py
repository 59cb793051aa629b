"""Broken configurations: what is said about each, and that it is all said at once."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

# Lines are counted from here in the tests below.
REASONING = (
    "reasoning: {plastic_lora: {rank: 4, alpha: 0.2, decay: 0.9}, memory: {dim: 8, top_k: 1, max_tokens: 8}, "
    "controller: {step_budget: 4, max_branches: 1}, rl: {horizon: 8, latency_weight: 0, stability_weight: 0}"
)
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


def complaint(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The message about a file `run.yaml`, with the folder's name taken out."""
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


def test_the_file_that_the_others_are_broken_from_is_good(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    assert Config.from_yaml(tmp_path / "run.yaml").train.learning_rate == 3e-3


# (what is replaced, by what, the whole message after the headline)
BROKEN = {
    "compiled and gathered": (
        "  steps: 500",
        "  steps: 500\n  compile: true\n  zero_stage: 3",
        """\
        run.yaml:8: train.compile: found true (true/false)
            allowed: false, or train.zero_stage below 3 and train.expert_parallel 1""",
    ),
    "unknown key": (
        "  steps: 500",
        "  steps: 500\n  warmup_stesp: 5",
        """\
        run.yaml:8: train.warmup_stesp: unknown key
            allowed: in train: steps, batch_rows, micro_batch_rows, micro_batch_parts,*
            did you mean train.warmup_steps?""",
    ),
    "unknown section": (
        "train:",
        "loging: {wandb: true}\ntrain:",
        """\
        run.yaml:6: loging: unknown key
            allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation
            did you mean logging?""",
    ),
    "key of another section": (
        "model:",
        "learning_rate: 1e-3\nmodel:",
        """\
        run.yaml:1: learning_rate: unknown key
            allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation
            did you mean train.learning_rate?""",
    ),
    "dots in a file": (
        "train:",
        "train.seed: 3\ntrain:",
        """\
        run.yaml:6: train.seed: unknown key (in a file, sections are nested, not written with dots)
            allowed: at the top: run, model, data, train, logging, export, evaluation, reasoning, ablation
            did you mean train?""",
    ),
    "misspelt required key": (
        "  steps: 500",
        "  step: 500",
        """\
        run.yaml:7: train.step: unknown key
            allowed: in train: steps,*
            did you mean train.steps?""",
    ),
    "string for an integer": (
        "d_model: 128",
        "d_model: wide",
        """\
        run.yaml:2: model.d_model: found "wide" (a string)
            allowed: an integer of at least 1""",
    ),
    "float for an integer": (
        "steps: 500",
        "steps: 5e2",
        """\
        run.yaml:7: train.steps: found 500.0 (a number)
            allowed: an integer of at least 1""",
    ),
    "true for an integer": (
        "layers: 4",
        "layers: true",
        """\
        run.yaml:3: model.layers: found true (true/false)
            allowed: an integer of at least 1""",
    ),
    "yes for true": (
        "{heads: 4}",
        "{heads: 4, qk_norm: yes}",
        """\
        run.yaml:4: model.attention.qk_norm: found "yes" (a string)
            allowed: true or false""",
    ),
    "out of range": (
        "learning_rate: 3e-3",
        "learning_rate: -1",
        """\
        run.yaml:10: train.learning_rate: found -1 (an integer)
            allowed: a number above 0""",
    ),
    "not a number": (
        "learning_rate: 3e-3",
        "learning_rate: .nan",
        """\
        run.yaml:10: train.learning_rate: found NaN (a number)
            allowed: a number above 0""",
    ),
    "integer of many digits": (
        "steps: 500",
        "steps: 1" + "0" * 5000,
        """\
        run.yaml:7: train.steps: an integer of more than 64 bits
            allowed: an integer that fits in 64 bits""",
    ),
    "unknown choice": (
        "steps: 500",
        "precision: bf61\n  steps: 500",
        """\
        run.yaml:7: train.precision: found "bf61" (a string)
            allowed: one of fp32, bf16 or fp16
            did you mean bf16?""",
    ),
    "list too short": (
        "steps: 500",
        "betas: [0.9]\n  steps: 500",
        """\
        run.yaml:7: train.betas: found a list of 1
            allowed: a list of 2, each a number of at least 0 and below 1""",
    ),
    "item of a list": (
        "steps: 500",
        "betas:\n  - 0.9\n  - 1.5\n  steps: 500",
        """\
        run.yaml:9: train.betas[1]: found 1.5 (a number)
            allowed: a number of at least 0 and below 1""",
    ),
    "string for a section": (
        "{heads: 4}",
        "rope",
        """\
        run.yaml:4: model.attention: found "rope" (a string)
            allowed: a section with the keys heads, kv_heads, rope,*""",
    ),
    "missing key": (
        "  batch_rows: 8\n",
        "",
        """\
        run.yaml:6: train.batch_rows: missing, and it has no default
            allowed: an integer of at least 1
            meaning: Rows of one optimizer step (global batch), over all processes.""",
    ),
    "missing key that a size sets; what follows from it is not reported": (
        "  d_model: 128\n",
        "",
        """\
        run.yaml:1: model.d_model: missing, and it has no default
            allowed: an integer of at least 1; or set model.size (1b, 4b, 40b, 200b, dense-*), which sets it
            meaning: Width of the residual stream.""",
    ),
    "reasoning without a size": (
        "train:",
        "reasoning: {plastic_lora: {rank: 4, alpha: 0.2, decay: 0.9}, memory: {dim: 8, top_k: 1, max_tokens: 8}, "
        "controller: {step_budget: 4, max_branches: 1}}\ntrain:",
        """\
        run.yaml:6: reasoning.rl: missing, and it has no default
            allowed: a section with the keys * (required: *); or set model.size (1b, 4b, 40b, 200b), which sets it""",
    ),
    "reasoning left empty": (
        "train:",
        "reasoning:\ntrain:",
        """\
        run.yaml:6: reasoning: found a section without keys
            allowed: {} for parameters by model.size, a section with keys, or null for a core run""",
    ),
    "unknown kind of source": (
        "train:",
        "data: {source: {kind: jsnl, paths: [a]}}\ntrain:",
        """\
        run.yaml:6: data.source.kind: found "jsnl" (a string)
            allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or text
            did you mean jsonl?""",
    ),
    "source without a kind": (
        "train:",
        "data: {source: {paths: [a]}}\ntrain:",
        """\
        run.yaml:6: data.source.kind: missing, and it has no default
            allowed: one of chat, *, csv, html, huggingface, jsonl, parquet, plugin, *, stdlib, *, tasks or text""",
    ),
    "key of another kind of source": (
        "train:",
        "data: {source: {kind: text, paths: [a], text_field: body}}\ntrain:",
        """\
        run.yaml:6: data.source.text_field: not a key of kind=text, but of csv, huggingface, jsonl, parquet
            allowed: in data.source: kind, paths""",
    ),
    "no paths": (
        "train:",
        "data: {source: {kind: text, paths: []}}\ntrain:",
        """\
        run.yaml:6: data.source.paths: found a list of 0
            allowed: a list of at least 1, each a string that is not empty""",
    ),
    "heads that do not divide the width": (
        "{heads: 4}",
        "{heads: 3}",
        """\
        run.yaml:4: model.attention.heads: found 3 (an integer)
            allowed: must divide model.d_model=128""",
    ),
    "default that does not fit: the line of the other key": (
        "d_model: 128",
        "d_model: 96",
        """\
        run.yaml:2: model.rwkv.head_size: found 64 (an integer)
            allowed: must divide model.d_model=96""",
    ),
    "more experts chosen than there are": (
        "{hidden: 256}",
        "{hidden: 256, experts: 2, top_k: 3}",
        """\
        run.yaml:5: model.feed_forward.top_k: found 3 (an integer)
            allowed: at most model.feed_forward.experts=2""",
    ),
    "swiglu channel-mix": (
        "{hidden: 256}",
        "{hidden: 256, kind: channel_mix, activation: swiglu}",
        """\
        run.yaml:5: model.feed_forward.activation: found "swiglu" (a string)
            allowed: relu2, for model.feed_forward.kind=channel_mix""",
    ),
    "batch that micro-batches do not fill": (
        "batch_rows: 8",
        "batch_rows: 12",
        """\
        run.yaml:8: train.batch_rows: found 12 (an integer)
            allowed: a multiple of train.micro_batch_rows=8""",
    ),
    "warmup longer than the run": (
        "steps: 500",
        "steps: 500\n  warmup_steps: 500",
        """\
        run.yaml:8: train.warmup_steps: found 500 (an integer)
            allowed: below train.steps=500""",
    ),
    "rollouts of a copy under expert parallelism": (
        "train:",
        REASONING + ", rollout_weights: copied}\ntrain:\n  expert_parallel: 2",
        """\
        run.yaml:6: reasoning.rollout_weights: found "copied" (a string)
            allowed: sharded with train.expert_parallel=2, whose processes need one another in every pass""",
    ),
    "a phase that replays itself": (
        "train:",
        REASONING + ", phases: {imitation: {replay: [text, imitation]}}}\ntrain:",
        """\
        run.yaml:6: reasoning.phases.imitation.replay[1]: found "imitation" (a string)
            allowed: another phase than its own""",
    ),
    "documents in token ids": (
        "train:",
        REASONING + ", agent: {tokens: true, data: {kind: jsonl, paths: [a]}}}\ntrain:",
        """\
        run.yaml:6: reasoning.agent.tokens: found true (true/false)
            allowed: false with a section data, whose documents are text""",
    ),
    "fp16 on a CPU": (
        "train:",
        "run: {device: cpu}\ntrain:\n  precision: fp16",
        """\
        run.yaml:8: train.precision: found "fp16" (a string)
            allowed: bf16 or fp32 with run.device=cpu; fp16 needs a GPU""",
    ),
    "a bfloat16 stream with other products": (
        "train:",
        "train:\n  precision: fp32\n  residual_dtype: bf16",
        """\
        run.yaml:8: train.residual_dtype: found "bf16" (a string)
            allowed: fp32 or null, or train.precision: bf16""",
    ),
    "small vocabulary": (
        "layers: 4",
        "layers: 4\n  vocab_size: 256",
        """\
        run.yaml:4: model.vocab_size: found 256 (an integer)
            allowed: at least 257 for a tokenizer trained on the corpus: 256 bytes and the end-of-text token""",
    ),
    "odd head width with RoPE": (
        "  d_model: 128\n  layers: 4\n  attention: {heads: 4}",
        "  d_model: 192\n  layers: 4\n  attention: {heads: 64}",
        """\
        run.yaml:2: model.attention.rope: found true (true/false)
            allowed: false, or an even head width; model.d_model/model.attention.heads is 3""",
    ),
    "grouped heads that do not come out even": (
        "{heads: 4}",
        "{heads: 4, kv_heads: 3}",
        """\
        run.yaml:4: model.attention.kv_heads: found 3 (an integer)
            allowed: must divide model.attention.heads=4""",
    ),
    "key written twice": (
        "  steps: 500",
        "  steps: 500\n  steps: 600",
        """\
        run.yaml:8: train.steps: written twice, first at run.yaml:7
            allowed: each key once""",
    ),
    "YAML syntax": (
        "  layers: 4",
        "  layers: [4",
        """\
        run.yaml:4: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'""",
    ),
    "tab": ("  layers: 4", "\tlayers: 4", "run.yaml:3: not valid YAML: *cannot start any token"),
    "merge key": (
        "  layers: 4",
        "  layers: 4\n  <<: {layers: 5}",
        """\
        run.yaml:4: model.<<: unknown key (settings are shared by `base: FILE`, not by merge keys)
            allowed: in model: kind, family,*""",
    ),
    "tag that would run code": (
        "layers: 4",
        "layers: !!python/object/apply:os.system [exit 1]",
        """\
        run.yaml:3: model.layers: the tag tag:yaml.org,2002:python/object/apply:os.system
            allowed: untagged mappings, lists, strings, numbers, true, false and null""",
    ),
    "a list as a key": (
        "layers: 4",
        "layers: 4\n  ? [a]\n  : 3",
        "run.yaml:4: model: a list or mapping as a key\n    allowed: a name",
    ),
    "half a character in a key": (
        "train:",
        'run: {"\\ud800": 3}\ntrain:',
        "run.yaml:6: run: half of a surrogate pair in a key\n    allowed: a name",
    ),
    "half a character": (
        "model:",
        'run: {name: "\\ud800"}\nmodel:',
        "run.yaml:1: run.name: half of a surrogate pair, which is not a character\n    allowed: Unicode text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    old, new, expected = BROKEN[name]
    assert old in GOOD
    said = complaint(tmp_path, GOOD.replace(old, new, 1)).splitlines()
    assert said[0] == "the configuration has one problem:"
    wanted = dedent(expected).splitlines()
    assert len(said) == 1 + len(wanted), "\n".join(said)
    for line, pattern in zip(said[1:], wanted, strict=True):
        pieces = pattern.split("*")  # any text
        assert line.startswith(pieces[0]), line
        assert line.endswith(pieces[-1]), line
        assert all(piece in line for piece in pieces), line


def test_every_problem_at_once(tmp_path: Path) -> None:
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
    assert heads[0] == "the configuration has 12 problems:"
    assert [tuple(head.split(": ")[:2]) for head in heads[1:-3]] == [
        ("base.yaml:2", "train.betas"),
        ("run.yaml:3", "model.rwkv.head_size"),
        ("run.yaml:4", "model.layers"),
        ("run.yaml:5", "model.attention.hads"),
        ("run.yaml:5", "model.attention.heads"),
        ("run.yaml:7", "trian"),
        ("run.yaml:8", "train.batch_rows"),
        ("run.yaml:8", "train.learning_rate"),
        ("run.yaml:8", "train.steps"),
    ]
    assert heads[-3:] == [
        "command line ('data.row_length={a'): data.row_length: not valid YAML: while parsing a flow mapping, "
        "expected ',' or '}', but got '<stream end>'",
        "command line ('run.seed=-1'): run.seed: found -1 (an integer)",
        "command line ('steps'): not an override",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "run.yaml:1: the file is empty"),
        (b"# only a comment\n", "run.yaml:1: the file is empty"),
        (b"- a\n- b\n", "run.yaml:1: found a list of 2 at the top of the file"),
        (b"just words", 'run.yaml:1: found "just words" (a string) at the top of the file'),
        (b"null\n", "run.yaml:1: found null (nothing) at the top of the file"),
        (b"\x7fELF\x00\x01", "run.yaml:1: a binary file, not YAML"),
        (b"run:\n  name: \xff\n", "run.yaml:2: the byte 0xff is not UTF-8"),
        (b"run:\n  name: \x07\n", "run.yaml:2: not valid YAML: the character U+0007"),
        (b"run: {}\n---\nrun: {}\n", "run.yaml:2: not valid YAML: expected a single document"),
        (b"run: *nowhere\n", "run.yaml:1: not valid YAML: found undefined alias 'nowhere'"),
        (b"run: " + b"[" * 5000, "run.yaml:1: nested too deep"),
        (b"run: " + b"[" * 60 + b"]" * 60, "run.yaml:1: too many values, or nested too deep"),
        (b"run: &a [*a]\n", "run.yaml:1: too many values, or nested too deep"),
        (b"#" * (1 << 20) + b"\n", "run.yaml:1: too large for a configuration"),
    ],
)
def test_what_is_no_configuration_at_all(content: bytes, expected: str, tmp_path: Path) -> None:
    headline, problem, *_ = complaint(tmp_path, content).splitlines()
    assert headline == "the configuration has one problem:"
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
