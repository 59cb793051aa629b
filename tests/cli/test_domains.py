"""Bits per byte by domain from the command line: exact sums, and the change of a trained model by domain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import main
from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.data.loader import EvalLoader
from cdrmix.data.prepare import prepare
from cdrmix.errors import Preempted
from cdrmix.eval.documents import score_documents
from cdrmix.eval.intervals import LEAST_UNITS
from cdrmix.eval.perplexity import evaluate
from cdrmix.inference.load import load_model
from cdrmix.model.loss import LossModel
from cdrmix.records import Record
from cdrmix.training.callbacks import Callback
from cdrmix.workflow import run_all

Arguments = Callable[..., list[str]]
PHASE = (
    "reasoning={chunk: 16, carry: fast, plastic_lora: {rank: 4, alpha: 0.5, decay: 1.0}, "
    "controller: {step_budget: 64, max_branches: 2}, memory: {dim: 16, top_k: 2, max_tokens: 1000, tokens: 4}, "
    "rl: {horizon: 64, group_size: 4, latency_weight: 0.01, stability_weight: 0.1}, "
    "plasticity: {task: recall, tokens: true, chunks: 2}, evaluation: {chunks: [4], episodes: 4}}",
    "reasoning.phases.plasticity={steps: 4, episodes: 4, micro_batch: 8, train: all}",
)


@pytest.fixture(scope="module")
def two_domains(arguments: Arguments, toy_text: Path, workspace: Path) -> Arguments:
    """`two_domains(*overrides)`: arguments of a toy run on Python and prose, three rows a batch."""
    prose = workspace / "prose"
    prose.mkdir()
    for number in range(24):
        (prose / f"{number}.txt").write_text(
            f"Guest {number} left the café on day {number + 3}, before {number}.\n" * 2
        )
    code_source, prose_source = (f"{{source: {{kind: text, paths: [{path}]}}}}" for path in (toy_text, prose))
    domains = f"{{code: {code_source}, prose: {prose_source}}}"

    def of(*overrides: str) -> list[str]:
        config, path, *toy = arguments()
        toy = [override for override in toy if not override.startswith("data.source")]
        return [
            config,
            path,
            *toy,
            f"data.domains={domains}",
            "train.batch_rows=3",
            "train.micro_batch_rows=3",
            *overrides,
        ]

    return of


@pytest.fixture(scope="module")
def finished(two_domains: Arguments, workspace: Path) -> Path:
    # Prose has no share in the training. It is evaluated all the same.
    curriculum = "data.curriculum=[{until: 1.0, domains: {code: 1, prose: 0}}]"
    assert main(["train", *two_domains(curriculum, f"run.root={workspace / 'two'}")]) == 0
    (run,) = (workspace / "two").iterdir()
    return run


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "metrics.json").read_text())
    return summary


def test_the_domains_sum_to_the_whole(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(finished), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole == summary_of(finished)["held_out"]
    domains = whole["domains"]
    assert set(domains) == {"code", "prose"}
    for count in ("tokens", "text_bytes"):
        assert sum(score[count] for score in domains.values()) == whole[count]
    nats = sum(score["loss_nats_per_token"] * score["tokens"] for score in domains.values())
    assert nats / whole["tokens"] == pytest.approx(whole["loss_nats_per_token"], rel=1e-14)
    for score in domains.values():
        bits = score["loss_nats_per_token"] * score["tokens"] / math.log(2) / score["text_bytes"]
        assert score["bits_per_byte"] == pytest.approx(bits, rel=1e-14)
    assert main(["eval", "--model", str(finished)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, score in domains.items():
        assert [name, f"{score['text_bytes']:,}", f"{score['bits_per_byte']:.4f}"] in printed


def test_a_domain_has_the_figures_of_its_rows_alone(finished: Path) -> None:
    """The rows are read one by one and by document; and the figures of the whole are those without domains."""
    loaded = load_model(finished)
    split = prepare(loaded.config, say=lambda _: None).valid
    held_out = summary_of(finished)["held_out"]
    loader = EvalLoader(split, loaded.config.data.row_length, 3)
    assert any(len(batch.domains) == 2 for batch in loader), "a batch must have rows of both domains"
    model = LossModel(loaded.model)
    assert evaluate(model, loader, split.text_bytes).bits_per_byte == held_out["bits_per_byte"]
    sums = {name: [0.0, 0, 0] for name in ("code", "prose")}
    for row, batch in enumerate(EvalLoader(split, loaded.config.data.row_length, 1)):
        pieces = list(split.pieces(row))
        (domain,) = {piece.domain for piece in pieces}
        sums[domain][0] += evaluate(model, [batch], 1).loss_nats_per_token * float(batch.weights_BT.sum())
        sums[domain][1] += sum(piece.tokens for piece in pieces)
    for document, text in enumerate(split.text()):
        sums[split.domain_of(document)][2] += len(text)
    for name, (nats, tokens, text_bytes) in sums.items():
        score = held_out["domains"][name]
        assert (score["tokens"], score["text_bytes"]) == (tokens, text_bytes)
        # Sums of float32 over three rows of 32 tokens: 96 roundings at most.
        assert score["loss_nats_per_token"] == pytest.approx(nats / tokens, rel=96 * torch.finfo(torch.float32).eps)


def test_suite_domains(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The values are those of `cdrmix eval`; the documents are those of a direct sum over the model's logits."""
    assert main(["eval", "--model", str(finished), "--json"]) == 0
    held_out = json.loads(capsys.readouterr().out)
    assert main(["eval", "--model", str(finished), "--suite", "domains", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    measures = {measure["name"]: measure for measure in result["measures"]}
    assert measures["bits_per_byte"]["value"] == held_out["bits_per_byte"]
    for name, score in held_out["domains"].items():
        measure = measures[f"{name} bits_per_byte"]
        assert measure["value"] == score["bits_per_byte"]
        assert (measure["low"] is None) == (measure["count"] < LEAST_UNITS)
    assert result["facts"]["tokens"] == held_out["tokens"]

    loaded = load_model(finished)
    split = prepare(loaded.config, say=lambda _: None).valid
    found = score_documents(loaded.loss_model(), split, row_length=loaded.config.data.row_length, micro_batch_rows=3)
    assert found.text_bytes.tolist() == [len(text) for text in split.text()]
    assert found.domains == [split.domain_of(number) for number in range(split.documents)]
    assert measures["code bits_per_byte"]["count"] == found.domains.count("code")
    sums = [0.0] * split.documents
    for row in range(split.rows):
        for piece in split.pieces(row):
            ids = torch.from_numpy(split.read(piece.start, piece.start + piece.tokens + 1))
            with torch.no_grad():
                logits = loaded.model.logits(loaded.model(ids[None, :-1]).hidden_BTD)[0].double()
            sums[piece.document] -= logits.log_softmax(-1)[torch.arange(piece.tokens), ids[1:]].sum().item()
    # Sums of float32 in another order: the recurrences of up to 32 tokens and 3 rows of 32 tokens.
    assert found.nats.tolist() == pytest.approx(sums, rel=1e-5)
    assert found.nats.sum() == pytest.approx(held_out["loss_nats_per_token"] * held_out["tokens"], rel=1e-5)


def test_validations_report_and_card_show_the_domains(finished: Path) -> None:
    validated = [row for row in read_metrics(finished / "metrics.jsonl") if row["valid_bits_per_byte"] is not None]
    assert [row["step"] for row in validated] == [2, 4]
    for row in validated:
        assert set(row["valid_domains"]) == {"code", "prose"}
        assert min(row["valid_domains"].values()) < row["valid_bits_per_byte"] < max(row["valid_domains"].values())
    page, card = (finished / "report.html").read_text(), (finished / "export" / "README.md").read_text()
    assert "Held-out text by domain" in page
    assert "Bits per byte of each domain over the steps" in page
    for score in summary_of(finished)["held_out"]["domains"].values():
        assert f"<td>{score['bits_per_byte']:.4f}</td>" in page
        assert f"| {score['bits_per_byte']:.4f} |" in card


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_record(self, record: Record) -> bool:
        return record.step == self.step


def test_a_trained_model_is_measured_before_the_first_step_and_once(
    finished: Path, two_domains: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_base = summary_of(finished)["held_out"]
    tokenizer = f"data.tokenizer.path={finished / 'tokenizer.json'}"
    base = f"reasoning.backbone={finished}"
    arguments = two_domains(*PHASE, base, tokenizer, f"run.root={tmp_path}")
    config = Config.from_yaml(Path(arguments[1]), arguments[2:])
    with pytest.raises(Preempted):
        run_all(config, callbacks=[StopAfter(2)])
    (run,) = tmp_path.iterdir()
    assert summary_of(run)["held_out_before"] == of_base
    run_all(config, resume="auto")
    summary = summary_of(run)
    assert (run / "train.log").read_text().count("Evaluating the weights before the training") == 1
    assert (summary["held_out_before"], summary["held_out_before_step"]) == (of_base, 0)
    page, card = (run / "report.html").read_text(), (run / "export" / "README.md").read_text()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, before in of_base["domains"].items():
        after = summary["held_out"]["domains"][name]["bits_per_byte"]
        difference = after - before["bits_per_byte"]
        assert difference != 0
        cells = [f"{before['text_bytes']:,}", f"{before['bits_per_byte']:.4f}", f"{after:.4f}", f"{difference:+.4f}"]
        assert [name, *cells] in printed
        assert f"| {name} | {' | '.join(cells)} |" in card
        assert f"<td>{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells[:-1]) in page
