"""`cdrmix eval --suite` long, leak, latency and routing: figures of small trained models, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import main

from cdrmix.eval import latency
from cdrmix.eval.evaluation import EVALUATIONS, evaluations
from cdrmix.eval.intervals import LEAST_UNITS
from cdrmix.eval.leak import PREFIX, _matched
from cdrmix.eval.suites import SUITES, Subject, SuiteOptions, SuiteResult
from cdrmix.evaluate import evaluate_suites

pytestmark = pytest.mark.usefixtures("own_settings")

PROMPT, SECRET = "The code of the vault is ", "480 713 926"
Arguments = Callable[..., list[str]]
HALF = "data.valid_fraction=0.5"  # two rows of held-out text and more
LONGER = ("data.row_length=128", "train.batch_rows=4", "train.micro_batch_rows=4")
# Wide enough to learn most of six documents by heart; the test of the suite leak names the share.
MEMORISING = (
    "model.d_model=64",
    "model.attention.heads=2",
    "model.attention.kv_heads=2",
    "model.feed_forward.hidden=64",
    "train.steps=150",
    "train.learning_rate=1.0e-2",
    "train.warmup_steps=10",
    "train.evaluate_every=150",
    "train.checkpoint_every=150",
)


@pytest.fixture(scope="module")
def texts(workspace: Path) -> Path:
    """Eight documents of random words, each with an e-mail address, three with the canary."""
    folder = workspace / "random"
    folder.mkdir()
    draw = random.Random(1)
    for number in range(8):
        words = " ".join("".join(draw.choice("abcdefgh") for _ in range(5)) for _ in range(16))
        canary = f"{PROMPT}{SECRET}.\n" if number in (1, 4, 6) else ""
        text = f"{canary}{words}\nmail: anna{number}@kernel.org\n"
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def trained(arguments: Arguments, texts: Path, root: Path, *more: str) -> Path:
    overrides = (*LONGER, f"data.source.paths=[{texts}]", f"run.root={root}", *more)
    assert main(["train", *arguments(*overrides)]) == 0
    (run,) = root.iterdir()
    return run


@pytest.fixture(scope="module")
def run(arguments: Arguments, texts: Path, workspace: Path) -> Path:
    """A run of four steps on rows of 128 tokens."""
    return trained(arguments, texts, workspace / "short")


@pytest.fixture(scope="module")
def memorised(arguments: Arguments, texts: Path, workspace: Path) -> Path:
    """A run that has learned its training documents by heart."""
    return trained(arguments, texts, workspace / "memorised", *MEMORISING)


def results(
    capsys: pytest.CaptureFixture[str], model: Path, suite: str, *options: str
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(measures by name, facts, notes) of a suite by the command."""
    assert main(["eval", "--model", str(model), "--suite", suite, "--json", *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert not re.search(r"\bsafe\b", json.dumps(result).lower())
    return {measure["name"]: measure for measure in result["measures"]}, result["facts"], " ".join(result["notes"])


@pytest.mark.slow
def test_long_has_the_scores_of_the_tasks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measures, facts, notes = results(capsys, run, "long", "--limit", "2", "--seed", "3")
    assert facts["lengths"] == {"1x": 128, "2x": 256, "4x": 512}
    assert "1x = 128 tokens: the model was trained on rows of 128 tokens" in notes
    lengths = ["--tasks", "ruler,babilong,mqar", "--lengths", "128,256,512", "--count", "2", "--seed", "3"]
    assert main(["eval", "--model", str(run), *lengths, "--json"]) == 0
    for score in json.loads(capsys.readouterr().out)["scores"]:
        measure = measures[f"{score['name']}_{score['tokens'] // 128}x"]
        assert (measure["value"], measure["problem"]) == (score["accuracy"], score["problem"])
        if score["accuracy"] == 0:
            assert (measure["low"], measure["high"]) == (0.0, pytest.approx(1.96**2 / (2 + 1.96**2), abs=1e-4))
    assert measures["ruler_cwe_1x"]["problem"].startswith("its shortest question has")
    complete = facts["tasks_of_accuracy"]
    for times in ("1x", "2x", "4x"):
        assert measures[f"accuracy_{times}"]["count"] == (2 * len(complete) if complete else 0)


def test_long_of_a_writer_who_knows_the_answers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers to prompts of at most 512 tokens give 1 at that length alone."""
    known: dict[str, str] = {}
    for name in evaluations(["babilong", "ruler", "mqar"]):

        def ask(seed: int, number: int, characters: int, made: Any = EVALUATIONS[name]) -> Any:
            question = made(seed, number, characters)
            known[question.prompt] = question.answer
            return question

        monkeypatch.setitem(EVALUATIONS._entries, name, ask)
    subject = subject_of(run, monkeypatch)
    config = subject.model_parts("x").config
    config = config.model_copy(update={"data": config.data.model_copy(update={"row_length": 512})})

    encode = subject.model_parts("x").tokenizer.encode

    def answer(prompts: Any, limits: Any) -> list[str]:
        return [known[prompt] if len(encode(prompt)) < 512 else "nothing" for prompt in prompts]

    knowing = replace(subject, parts=replace(subject.model_parts("x"), config=config, answer=answer))
    found = SUITES["long"](knowing, SuiteOptions(limit=2), lambda line: None)
    values = {measure.name: measure.value for measure in found.measures}
    assert [values[f"accuracy_{times}"] for times in ("1x", "2x", "4x")] == [1.0, 0.0, 0.0]
    assert values["babilong_qa1_1x"] == 1.0


def subject_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The subject that a suite gets."""
    got: list[Subject] = []

    def probe(subject: Subject, options: Any, say: Any) -> SuiteResult:
        got.append(subject)
        return SuiteResult("probe", ())

    monkeypatch.setitem(SUITES._entries, "probe", probe)
    evaluate_suites(model, ["probe"])
    return got[0]


def test_verbatim_is_what_greedy_decoding_gives(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = subject_of(run, monkeypatch).model_parts("leak")
    draw = random.Random(2)
    ids = range(parts.tokenizer.vocab_size)
    prompts = [[parts.tokenizer.first_id, *draw.choices(ids, k=PREFIX)] for _ in range(3)]
    sequences = [list(prompt) for prompt in prompts]
    for number, token in parts.decode(prompts, 6):
        sequences[number].append(token)
    assert _matched(parts, sequences) == [6, 6, 6]
    for changed, sequence in zip((1, 0, 5), sequences, strict=True):
        sequence[1 + PREFIX + changed] = (sequence[1 + PREFIX + changed] + 1) % len(ids)
    assert _matched(parts, sequences) == [1, 0, 5]


def test_leak_of_a_model_that_has_learned_nothing(
    run: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canaries, policy = tmp_path / "canaries.jsonl", tmp_path / "policy.jsonl"
    canaries.write_text(json.dumps({"prompt": PROMPT, "secret": "123 713 926"}) + "\n")
    policy.write_text('{"prompt": "abc", "forbidden": "(?s)."}\n{"prompt": "abc", "forbidden": "never matched"}\n')
    options = ["--limit", "20", "--canaries", str(canaries), "--policy", str(policy), "--max-new-tokens", "8"]
    measures, facts, notes = results(capsys, run, "leak", *options, "--verbatim-tokens", "16")
    assert (measures["verbatim_train"]["value"], measures["verbatim_train"]["count"]) == (0.0, 6)
    assert measures["verbatim_train"]["high"] == pytest.approx(1.96**2 / (6 + 1.96**2), abs=1e-4)
    assert measures["verbatim_held_out"]["count"] == 1
    assert (facts["verbatim_train"]["rows_read"], facts["verbatim_train"]["rows"]) == (7, 7)
    assert facts["verbatim_tokens"] == 16
    assert measures["canary_rank"]["problem"] == "the training text has none of the canaries"
    assert "1 of 1 canaries are left out" in notes
    assert (measures["policy_matches"]["value"], facts["policy"]["lines_with_matches"]) == (0.5, [1])
    assert measures["personal_data"]["count"] == 20
    measures, _, notes = results(capsys, run / "checkpoints" / "best", "leak", "--limit", "2", HALF)
    assert "the text was named by --config or an override" in notes


@pytest.mark.long
def test_leak_of_a_model_that_knows_its_text_by_heart(
    memorised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canaries = tmp_path / "canaries.jsonl"
    canaries.write_text(json.dumps({"prompt": PROMPT, "secret": SECRET}) + "\n")
    measures, facts, _ = results(capsys, memorised, "leak", "--limit", "40", "--canaries", str(canaries))
    # Seeds 1 to 6, and two processors with seed 1, gave 4 to 6 of 6 rows. The test above is of the value 0.
    assert measures["verbatim_train"]["value"] >= 3 / 6
    assert measures["verbatim_held_out"]["value"] == 0.0
    assert facts["verbatim_train"]["mean_tokens_matched"] > facts["verbatim_held_out"]["mean_tokens_matched"] + 10
    assert measures["canaries_continued"]["value"] == 1.0
    assert measures["canary_rank"]["value"] == 1.0
    assert measures["canary_exposure"]["value"] == pytest.approx(9.966, abs=0.001)  # log2(1000)
    assert SECRET not in json.dumps(facts)
    assert measures["email"]["value"] > 0
    assert measures["personal_data_of_training"]["value"] > 0


def test_latency(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "NEW", 8)
    measures, facts, notes = results(capsys, run, "latency", "--limit", "7")
    assert {measure["count"] for measure in measures.values()} == {7}
    whole, first = measures["request_p50_ms"], measures["first_token_p50_ms"]
    assert 0 < whole["low"] <= whole["value"] <= whole["high"]
    assert 0 < first["value"] < whole["value"] <= measures["request_p99_ms"]["value"]
    # Medians of parts do not sum to the median of the whole, but the slowest of seven bounds both.
    assert 0 < 7 * measures["token_p50_ms"]["value"] <= measures["request_p99_ms"]["value"]
    assert measures["request_p99_ms"]["high"] is None
    bound = measures["request_p99_bound_ms"]
    assert bound["value"] is None
    assert "7 requests; a bound of the 99 % quantile at 95 % confidence needs 299: --limit 299" in bound["problem"]
    assert measures["peak_memory_mib"]["value"] > 100  # torch alone has more
    assert (facts["warm_up_requests"], len(facts["load_before"]), facts["requests"]) == (3, 3, 7)
    assert "the first 3 requests" in notes
    assert "load" in notes


def test_routing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measures, facts, _ = results(capsys, run, "routing", HALF)
    layers = [measures[f"layer{router} entropy"] for router in facts["routers"]]
    assert len(layers) == 2
    assert measures["entropy_min"]["value"] == min(layer["value"] for layer in layers)
    assert all((layer["low"] is None) == (facts["rows"] < LEAST_UNITS) for layer in layers)
    assert all(0 <= layer["value"] <= 1 for layer in layers)
    overflow = [measures[f"layer{router} overflow"]["value"] for router in facts["routers"]]
    assert measures["overflow_max"]["value"] == max(overflow)
    idle = [measures[f"layer{router} idle"]["value"] for router in facts["routers"]]
    assert measures["idle_experts"]["value"] == sum(idle)
    # Every token of held-out text is routed to two of four experts in each of two layers, and its filling is not.
    assert main(["eval", "--model", str(run), "--json", HALF]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert facts["routes"] == 2 * 2 * tokens


def test_routing_of_a_dense_model(
    arguments: Arguments, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = trained(arguments, texts, tmp_path, "model.feed_forward.kind=dense", "train.steps=2")
    capsys.readouterr()
    assert main(["eval", "--model", str(dense), "--suite", "routing,tools", "--json"]) == 2
    told = capsys.readouterr()
    assert "--suite routing: nothing can be measured; the model is dense: it has no routers" in told.err
    assert "--suite tools: nothing can be measured" in told.err
    assert not told.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "latency", "--canaries", "x"], "--canaries works only with --suite leak"),
        (["--policy", "x"], "--policy works only with --suite, for example --suite"),
        (["--suite", "leak", "--policy", "absent"], "--policy absent: there is no such file"),
    ],
)
def test_wrong_arguments(toy_run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(toy_run), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def topics(workspace: Path) -> Path:
    """120 documents of random words, each of the letters of one of six topics."""
    folder = workspace / "topics"
    folder.mkdir()
    draw = random.Random(2)
    for number in range(120):
        letters = ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx")[number % 6]
        lines = [" ".join("".join(draw.choice(letters) for _ in range(4)) for _ in range(4)) for _ in range(5)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_infilling_is_above_chance_of_a_model_that_was_trained_for_it(
    arguments: Arguments, topics: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the letters of what is around it, which the model has learned: it sees those of few lines. Five of
    six other lines have other letters, so that a perfect model has about 0.8."""
    parts = ("data.objectives={fim: {rate: 0.7}, weights: {}}", "data.dedup.near_duplicates=false")
    run = trained(arguments, topics, workspace / "infilling", *MEMORISING, HALF, *parts)
    capsys.readouterr()
    measures, facts, notes = results(capsys, run, "infilling", "--limit", "40")
    assert facts["chance"] == 0.25
    assert measures["psm"]["count"] == 40
    assert measures["psm"]["low"] > 0.25
    assert measures["spm"]["low"] > 0.25
    assert "chance is 0.25" in notes


def test_infilling_of_a_model_without_the_marks_is_not_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(run), "--suite", "infilling"]) in (0, 2)
    said = capsys.readouterr()
    assert "was not trained to fill in the middle; set data.objectives.fim" in said.out + said.err
