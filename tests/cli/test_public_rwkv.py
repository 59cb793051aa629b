"""Training from public RWKV-7 weights, by a configuration alone: stage B, continued training, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_process import main
from json_rows import read_metrics
from public_rwkv7 import VOCABULARY, logits_of_the_package, public_weights

from cdrmix.inference.load import load_model

MODEL = """
model:
  vocab_size: 65536
  d_model: 64
  layers: 2
  attention_fraction: 0
  tie_embeddings: false
  attention: {heads: 1, kv_heads: 1}
  rwkv: {head_size: 64, decay_rank: 8, iclr_rank: 16, value_rank: 24, gate_rank: 32}
  feed_forward: {kind: channel_mix, hidden: 96}
"""
RUN = """
run: {{root: {folder}/runs, threads: 1}}
data:
  row_length: 64
  cache: {folder}/cache
  source: {{kind: text, paths: [{text}]}}
  valid_fraction: 0.25
  tokenizer: {{path: {vocabulary}}}
train:
  steps: 2
  batch_rows: 2
  micro_batch_rows: 2
  learning_rate: 1.0e-4
  precision: fp32
  log_every: 1
  checkpoint_every: 2
"""
STAGE_B = """
reasoning:
  backbone: {weights}
  chunk: 32
  carry: fast
  plastic_lora: {{rank: 4, alpha: 0.5, decay: 1.0, rwkv7: [output]}}
  controller: {{step_budget: 64, max_branches: 1}}
  memory: {{dim: 16, top_k: 2, max_tokens: 1000, tokens: 64}}
  rl: {{horizon: 64, group_size: 2, latency_weight: 0.01, stability_weight: 0.1}}
  plasticity: {{task: chunk_recall, chunks: 2, difficulty: {{pairs: 2}}}}
  agent: {{task: chunk_recall, chunks: 3, difficulty: {{pairs: 2}}}}
  phases:
    plasticity: {{steps: 2, episodes: 2, micro_batch: 8}}
    imitation: {{steps: 2, episodes: 2, micro_batch: 8}}
    policy: {{steps: 1, episodes: 2, micro_batch: 8}}
  evaluation: {{chunks: [2], episodes: 2}}
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as the public ones: the World vocabulary, bfloat16."""
    path = tmp_path_factory.mktemp("public") / "RWKV-x070-World-tiny.pth"
    public = public_weights(65_536, layers=2, width=64, hidden=96)
    torch.save({name: tensor.bfloat16() for name, tensor in public.items()}, path)
    return path


def written(folder: Path, text: Path, *parts: str, **values: object) -> Path:
    path = folder / "run.yaml"
    values = {"folder": folder, "text": text, "vocabulary": VOCABULARY} | values
    path.write_text("".join([MODEL, *(part.format(**values) for part in parts)]))
    return path


@pytest.mark.long
def test_stage_b_begins_with_public_weights(
    weights: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, toy_text, RUN, STAGE_B, weights=weights)
    assert main(["validate", "--config", str(config)]) == 0
    assert main(["train", "--config", str(config)]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["plasticity"] * 2 + ["imitation"] * 2 + ["policy"]
    summary = json.loads((run / "metrics.json").read_text())
    assert summary["finished"]
    assert summary["held_out_before_step"] == 0
    assert 8 < summary["held_out_before"]["loss_nats_per_token"] < 15, "of random weights: about log(65536) = 11.1"
    loaded = load_model(run / "export")
    assert loaded.model.adapters == 2
    public = torch.load(weights)
    # the phases have trained every weight, a little: it is the public model that they began with
    moved = (loaded.model.head.weight - public["head.weight"].float()).abs().max()
    assert 0 < moved < 0.01
    document = tmp_path / "book.txt"
    document.write_text("The code of Dukuro is 7347. The sea is calm.")
    capsys.readouterr()
    question = ["--document", str(document), "--question", "What is the code of Dukuro?"]
    assert main(["reason", "demo", "--model", str(run), *question]) == 0
    assert "Question: What is the code of Dukuro?" in capsys.readouterr().out
    lengths = ["--tasks", "recall", "--lengths", "128", "--count", "2", "--json"]
    assert main(["reason", "eval", "--model", str(run / "export"), *lengths]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["export", "--model", str(run), "--rwkv", str(tmp_path / "back.pth")]) == 2
    assert "reasoning.plastic_lora: the model has fast weights" in capsys.readouterr().err


@pytest.mark.long
def test_stage_a_goes_on_from_public_weights_and_gives_them_back(weights: Path, toy_text: Path, tmp_path: Path) -> None:
    config = written(tmp_path, toy_text, RUN)
    # by hand and as a folder: the same weights, so the same run
    folder = tmp_path / "imported"
    assert main(["import", str(weights), "--tokenizer", str(VOCABULARY), "--out", str(folder)]) == 0
    runs = []
    for number, start in enumerate((weights, folder)):
        root = tmp_path / f"runs-{number}"
        overrides = [f"train.start_from={start}", f"run.root={root}"]
        assert main(["train", "--config", str(config), *overrides]) == 0
        runs += root.iterdir()
    assert main(["compare", *map(str, runs)]) == 0
    back = tmp_path / "back.pth"
    assert main(["export", "--model", str(runs[0]), "--rwkv", str(back)]) == 0
    trained, public = torch.load(back), torch.load(weights)
    moved = max((trained[name] - public[name].float()).abs().max() for name in trained)
    assert 0 < moved < 0.01, "two steps with a learning rate of 1e-4"
    loaded = load_model(runs[0])
    ids = [0, *loaded.tokenizer.encode("def f(x):\n    return x + 1\n\n" * 4)]
    whole, _ = logits_of_the_package(back, ids)
    with torch.no_grad():
        ours = loaded.model.logits(loaded.model(torch.tensor([ids])).hidden_BTD)[0]
    assert (ours - whole).abs().max() / whole.abs().max() < 2e-5, "as in tests/hf/test_import_rwkv.py"


@pytest.mark.long
def test_stage_b_takes_the_model_from_an_imported_folder(weights: Path, toy_text: Path, tmp_path: Path) -> None:
    """Its configuration is a base, so that no size is written."""
    folder = tmp_path / "imported"
    assert main(["import", str(weights), "--tokenizer", str(VOCABULARY), "--out", str(folder)]) == 0
    config = written(tmp_path, toy_text, RUN, STAGE_B, weights=folder, vocabulary=folder / "tokenizer_cdrmix.json")
    config.write_text(config.read_text().replace(MODEL, f"base: {folder}/config_snapshot.yaml\n"))
    shorter = [f"reasoning.phases.{name}.steps=0" for name in ("imitation", "policy")]
    assert main(["train", "--config", str(config), *shorter]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert {row["phase"] for row in read_metrics(run / "metrics.jsonl")} == {"plasticity"}


@pytest.mark.parametrize("part", [STAGE_B, "  start_from: {weights}\n"])
def test_another_model_is_refused_with_file_and_line(
    part: str, weights: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, toy_text, RUN, part, weights=weights)
    wrong = (
        config.read_text()
        .replace("d_model: 64", "d_model: 128")
        .replace("gate_rank: 32", "gate_rank: 33, allow_neg_eigval: true")
        .replace("kind: channel_mix, hidden: 96", "kind: dense, hidden: 80")
        .replace("attention_fraction: 0", "attention_fraction: 0.5")
        .replace("layers: 2\n", "layers: 4\n")
    )
    config.write_text(wrong)
    for command in ("validate", "train"):
        assert main([command, "--config", str(config), "model.norm=rmsnorm", "model.vocab_size=65600"]) == 2
        error = capsys.readouterr().err
        assert "the configuration has 9 problems:" in error
        for line, key, found, allowed in (
            (4, "d_model", "128 (an integer)", f"64, as in {weights}"),
            (5, "layers", "4 (an integer)", f"2, as in {weights}"),
            (6, "attention_fraction", "0.5 (a number)", "0, with no attention layer in model.mixer_layers, as in all"),
            (9, "rwkv.allow_neg_eigval", "true (true/false)", "false, as in all public RWKV-7 models"),
            (9, "rwkv.gate_rank", "33 (an integer)", f"32, as in {weights}"),
            (10, "feed_forward.kind", '"dense" (a string)', "channel_mix, as in all public RWKV-7 models"),
            (10, "feed_forward.hidden", "80 (an integer)", f"96, as in {weights}"),
        ):
            assert f"{config}:{line}: model.{key}: found {found}\n    allowed: {allowed}" in error
        assert "command line ('model.norm=rmsnorm'): model.norm: found" in error
        assert "command line ('model.vocab_size=65600'): model.vocab_size: found" in error
    assert not (tmp_path / "runs").exists()


def test_what_a_file_of_weights_needs(
    weights: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, toy_text, RUN, STAGE_B, weights=weights)

    def refused(*overrides: str, status: int = 2) -> str:
        assert main(["validate", "--config", str(config), *overrides]) == status
        return capsys.readouterr().err

    trained = "data.tokenizer={path: null, end_of_text: '<|end|>'}"
    for start in ([], ["reasoning=null", f"train.start_from={weights}"]):
        assert f"allowed: the tokenizer of {weights}" in refused(trained, *start)
    error = refused("model.tie_embeddings=true")
    assert f"model.tie_embeddings: found true (true/false)\n    allowed: false: {weights} has a head.weight" in error
    public = torch.load(weights)
    del public["blocks.1.ln1.weight"]
    torch.save(public, tmp_path / "damaged.pth")
    error = refused(f"reasoning.backbone={tmp_path / 'damaged.pth'}", status=5)
    assert "missing tensors: blocks.1.ln1.weight" in error


@pytest.mark.long
def test_a_model_with_tied_embeddings_takes_a_file_whose_head_is_the_embedding(
    weights: Path, toy_text: Path, tmp_path: Path
) -> None:
    public = torch.load(weights)
    torch.save(public | {"head.weight": public["emb.weight"]}, tmp_path / "tied.pth")
    config = written(tmp_path, toy_text, RUN, STAGE_B, weights=tmp_path / "tied.pth")
    phases = [f"reasoning.phases.{name}.steps=0" for name in ("imitation", "policy")]
    assert main(["train", "--config", str(config), "model.tie_embeddings=true", *phases]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "head.weight" not in load_model(run).weights
