"""Tests of the command line: a whole run in-process, every command on it, and the messages of failures."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import main
from json_rows import read_metrics

from cdrmix import workflow as lifecycle
from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Phases
from cdrmix.errors import CheckpointError
from cdrmix.eval.perplexity import Baselines, HeldOut, Score
from cdrmix.hf.card import STAGE_A_ONLY
from cdrmix.inference.sampling import Sampling
from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder
from cdrmix.training.distributed import DistributedContext

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "cdrmix-core-tiny.yaml"
CONFIGURATIONS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs" / "ablations").glob("*.yaml")])


@pytest.fixture(scope="module")
def finished(arguments: Arguments, workspace: Path) -> RunFolder:
    """A finished run; its console output is in console.txt in the same folder."""
    with (workspace / "console.txt").open("w") as console, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", console)
        status = main(["train", *arguments()])
    assert status == 0
    (path,) = (workspace / "runs").iterdir()
    return RunFolder.open(path)


def test_a_run_folder_holds_everything_and_its_path_is_the_last_line(workspace: Path, finished: RunFolder) -> None:
    assert (workspace / "console.txt").read_text().splitlines()[-1] == str(finished.path)
    names = {path.name for path in finished.path.iterdir()}
    assert {"config_snapshot.yaml", "metrics.jsonl", "metrics.json", "train.log", "checkpoints"} <= names
    assert {"report.html", "loss.png", "load.png", "export", "tokenizer.json"} <= names
    assert [row["step"] for row in read_metrics(finished.metrics_jsonl)] == [1, 2, 3, 4]
    summary = finished.summary()
    assert summary["finished"]
    assert summary["held_out"]["bits_per_byte"] > 0
    assert summary["corpus"]["documents"] == 24
    for line in ("gzip -9", "zstd -19", "unigram", "Sample:"):
        assert line in finished.log.read_text()


@pytest.mark.usefixtures("drawn_pictures")
def test_the_report_needs_no_network_and_escapes_what_it_shows(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.update_summary({"sample": {"prompt": "<script>", "text": "a & b </pre>"}})
    assert main(["report", str(finished.path)]) == 0
    assert capsys.readouterr().out.strip() == str(finished.report)
    page = finished.report.read_text()
    assert "&lt;script&gt;" in page
    assert "a &amp; b &lt;/pre&gt;" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "data:image/png;base64," in page
    assert finished.plot.read_bytes().startswith(b"\x89PNG")
    assert f"{finished.summary()['held_out']['zstd19_bits_per_byte']:.3f}" in page


def test_eval_prints_the_run_s_own_figures(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (finished.path, finished.export):
        assert main(["eval", "--model", str(model), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == finished.summary()["held_out"]
    assert main(["eval", "--model", str(finished.path)]) == 0
    printed = capsys.readouterr().out
    assert "bits per byte" in printed
    # The text has one domain, so nothing is shown by domain.
    assert len(printed.splitlines()) == 6
    assert "domains" not in finished.summary()["held_out"]
    assert "Held-out text by domain" not in finished.report.read_text()


def test_eval_takes_the_shards_of_the_run_wherever_it_is_called(
    arguments: Arguments,
    toy_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lifecycle, "_after_training", lambda *_: None)
    shutil.copytree(toy_text, "text")
    here = ("run.root=runs", "data.cache=cache", "data.source.paths=[text]")
    assert main(["train", *arguments(*here, "train.steps=2")]) == 0
    (run,) = (path.absolute() for path in Path("runs").iterdir())
    capsys.readouterr()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    outputs = []
    for more in ([], ["run.threads=2"], ["data.workers=2", "run.name=x"], ["train.micro_batch_rows=2", "data.cache=y"]):
        assert main(["eval", "--model", str(run), "--json", *more]) == 0
        captured = capsys.readouterr()
        assert "Preparing" not in captured.err, more
        outputs.append(captured.out)
    assert len(set(outputs[:3])) == 1
    assert not list(elsewhere.iterdir())
    # Moved shards are found in data.cache; without them the text is prepared again, and it is not here.
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert main(["eval", "--model", str(run), "--json", f"data.cache={tmp_path / 'moved'}"]) == 0
    assert capsys.readouterr().out == outputs[0]
    assert main(["eval", "--model", str(run), "--json"]) == 3
    assert "text" in capsys.readouterr().err


def test_a_bounded_evaluation_reads_a_part_and_tells_its_progress(
    finished: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdrmix.eval.countdown.INTERVAL", 0.0)
    whole = finished.summary()["held_out"]
    model = ["eval", "--model", str(finished.path), "--json"]
    found = []
    for more in ([], ["evaluation.max_tokens=33"], ["evaluation.max_tokens=1"], ["evaluation.max_tokens=1000000"]):
        assert main([*model, "train.micro_batch_rows=1", *more]) == 0
        captured = capsys.readouterr()
        found.append(json.loads(captured.out))
        told = "held-out rows are read (evaluation.max_tokens)" in captured.err
        assert told == (found[-1]["tokens"] < whole["tokens"])
        assert ("held-out text: 50%, 0:00 left" in captured.err) == (not told)
    assert found[0] == found[3] == whole
    assert found[1] == found[2]  # one row
    assert 0 < found[1]["tokens"] <= 32
    assert found[1]["text_bytes"] < whole["text_bytes"]
    assert found[1]["gzip9_bits_per_byte"] > whole["gzip9_bits_per_byte"]  # of this text too, which is shorter
    assert main([*model, "evaluation.max_tokens=33", "train.micro_batch_rows=1", "--suite", "domains"]) == 0
    captured = capsys.readouterr()
    assert "1 of 2 held-out rows" in captured.err
    (suite,) = json.loads(captured.out)
    assert suite["measures"][0]["value"] == pytest.approx(found[1]["bits_per_byte"])


def test_the_share_of_held_out_tokens_is_told(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = arguments(f"data.cache={tmp_path}")
    assert main(["data", "prepare", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads((Path(lines[-1]) / "index.json").read_text())["report"]
    share = report["valid"]["tokens"] / report["tokens"]
    assert f"{report['held_out_share']:.1%} of documents and {share:.1%} of tokens held out" in lines[-2]
    assert f"of documents held out, {share:.1%} of tokens" in (Path(lines[-1]) / "report" / "report.html").read_text()


def test_eval_reads_other_text_with_the_model_s_tokenizer(
    arguments: Arguments, workspace: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = workspace / "other"
    other.mkdir()
    for number in range(12):
        (other / f"{number}.txt").write_text(f"Number {number} is not {number + 1}; äöü.\n" * 4)
    model = ["eval", "--model", str(finished.export), "--json"]
    assert main([*model, "--config", str(TINY), *arguments()[2:], f"data.source.paths=[{other}]"]) == 0
    captured = capsys.readouterr()
    assert "Preparing" in captured.err  # which may take hours
    figures = json.loads(captured.out)
    assert figures["text_bytes"] != finished.summary()["held_out"]["text_bytes"]
    assert figures["bits_per_byte"] > 0


def test_generate_streams_and_repeats(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for model in (finished.path, finished.export):
        assert main(["generate", "--model", str(model), "--prompt", "def ", "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert main(["generate", "--model", str(finished.path), "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out
    several = ["--samples", "5", "--prompt", "def ", "--prompt", "x", "--max-new-tokens", "8"]
    assert main(["generate", "--model", str(finished.path), *several, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines] == [(p, n) for p in ("def ", "x") for n in range(1, 6)]
    assert texts[0] == f"def {lines[0]['text']}\n"  # alone and among ten rows: the same text
    assert main(["generate", "--model", str(finished.path), *several]) == 0
    assert f"--- prompt 2, seed 3\nx{lines[7]['text']}\n" in capsys.readouterr().out
    assert main(["generate", "--model", str(finished.path), "--top-p", "1.5"]) == 2
    assert "top_p must be above 0 and at most 1; found 1.5" in capsys.readouterr().err
    assert main(["generate", "--model", str(finished.path), "--seed", str(2**70)]) == 2
    assert "seed must be at least 0" in capsys.readouterr().err
    assert main(["generate", "--model", str(finished.path), "--prompt", "\udcff"]) == 2
    assert "a prompt must be UTF-8 text" in capsys.readouterr().err


def test_every_option_of_sampling_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Model:
        drafts = None

        def stream(self, prompts: list[str], sampling: Sampling, *, speculative: bool) -> list[tuple[int, str]]:
            asked.append((prompts, sampling, speculative))
            return []

        def sample(self, prompts: list[str], samples: int, sampling: Sampling, *, speculative: bool) -> list[list[str]]:
            asked.append((prompts, samples, sampling, speculative))
            return [[]] * len(prompts)

    monkeypatch.setattr("cdrmix.hf.load.load", lambda model, device: Model())
    numbers = [
        "--temperature",
        "0.5",
        "--top-p",
        "0.6",
        "--top-k",
        "7",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.5",
    ]
    command = ["generate", "--model", "any", "--prompt", "a", *numbers, "--seed", "3", "--max-new-tokens", "9"]
    command += ["--stop", "x", "--stop", "y"]
    assert main(command) == 0
    assert main([*command, "--samples", "2", "--speculative"]) == 0
    sampling = Sampling(
        temperature=0.5,
        top_p=0.6,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        seed=3,
        max_new_tokens=9,
        stop=("x", "y"),
    )
    assert asked == [(["a"], sampling, False), (["a"], 2, sampling, True)]


def test_export_and_compare(workspace: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    out, remains = workspace / "exported", workspace / ".exported.999999999.tmp"
    remains.mkdir()  # of an export that was killed
    assert main(["export", "--model", str(finished.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert not remains.exists()
    assert main(["report", str(out)]) == 2  # a report is of a run; an export is not written into
    assert "is an exported model" in capsys.readouterr().err
    assert main(["compare", str(finished.path), str(out)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert main(["export", "--model", str(finished.path)]) == 2  # its export/ is there already
    (first, *_) = sorted((finished.checkpoints).glob("step-*"))
    assert main(["compare", str(finished.path), str(first)]) == 1
    assert "steps differ" in capsys.readouterr().out
    assert main(["compare", str(finished.path), str(workspace)]) == CheckpointError.exit_code


def test_an_export_made_before_training_went_on_is_made_anew(
    arguments: Arguments, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished.export)
    early = finished.checkpoints / "step-00000002"
    with finished.locked():  # another process works on the run
        assert main(["export", "--model", str(early)]) == 2
    assert "another process" in capsys.readouterr().err
    assert not finished.export.exists()
    assert main(["export", "--model", str(early)]) == 0
    assert json.loads((finished.export / "config.json").read_text())["step"] == 2
    figure = f"{finished.summary()['held_out']['bits_per_byte']:.4f}"
    assert figure not in (finished.export / "README.md").read_text()  # the figures of step 4
    finished.update_summary({"finished": False})
    assert main(["train", *arguments(), "--resume", "auto"]) == 0
    assert "has the model of step 2, not of step 4" in capsys.readouterr().out
    assert main(["compare", str(finished.path), str(finished.export)]) == 0
    assert figure in (finished.export / "README.md").read_text()


def test_only_the_first_process_hashes_the_shards(
    finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "shards"
    shutil.copytree(finished.summary()["corpus"]["shards"], copy)
    (tokens,) = copy.glob("train.tokens-*.bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # which hashing would find
    second = DistributedContext(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    answers = iter([(copy, None), None])  # of the first process: the path, and that it sees the folder
    monkeypatch.setattr(DistributedContext, "gather", lambda world, item, what: [next(answers), item])
    run = RunFolder.open(finished.path, writes=False)
    assert lifecycle._prepare(Config.from_yaml(run.config_snapshot), run, second).path == copy


def test_an_unfinished_run_s_checkpoints_are_not_hashed_to_learn_that_it_is_unfinished(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_yaml(finished.config_snapshot)
    assert lifecycle._finished(config, finished)
    monkeypatch.setattr(lifecycle, "newest_whole_checkpoint", None)  # not called
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    assert not lifecycle._finished(longer, finished)


def test_a_finished_training_goes_on_with_what_is_missing(
    arguments: Arguments, workspace: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.checkpoints.rglob("*")}
    summary = finished.summary()
    shutil.rmtree(finished.export)
    finished.report.unlink()
    finished.update_summary({"finished": False})
    with finished.locked():  # another process works on it: not to be taken for unfinished
        assert main(["train", *arguments(), "--resume", str(finished.path)]) == 2
    assert "another process" in capsys.readouterr().err
    assert main(["train", *arguments(), "--resume", "auto"]) == 0
    out = capsys.readouterr().out
    assert "Stage A is already complete: 4 steps" in out
    assert out.splitlines()[-1] == str(finished.path)
    assert finished.export.is_dir()
    assert finished.report.is_file()
    assert {path: path.stat().st_mtime_ns for path in finished.checkpoints.rglob("*")} == before
    assert finished.summary()["held_out"] == summary["held_out"]


def test_params_and_validate(arguments: Arguments, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "--config", str(ROOT / "configs" / "cdrmix-core-1b.yaml")]) == 0
    table = capsys.readouterr().out
    for part in (
        "embedding",
        "time-mix",
        "attention",
        "router",
        "experts",
        "norms",
        "head",
        "1b means 1,000,000,000 active",
    ):
        assert part in table
    assert main(["validate", *arguments()]) == 0
    snapshot = workspace / "snapshot.yaml"
    snapshot.write_text(capsys.readouterr().out)
    assert main(["validate", "--config", str(snapshot)]) == 0
    assert capsys.readouterr().out == snapshot.read_text()


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_the_configurations_of_the_project_are_valid(path: Path) -> None:
    assert main(["validate", "--config", str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train", "--config", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["validate", "--config", str(TINY), "train.step=5"], 2, "train.steps"),
        (["validate", "--config", str(TINY), "--bogus"], 2, "'--bogus'"),
        (["validate", "--config", str(TINY), "steps"], 2, "'steps'"),
        (["compare", "a", "b", "c=d"], 2, "'c=d'"),
        (["eval", "--model", "nowhere"], 5, "nowhere does not exist"),
        (["report", "nowhere"], 2, "not a run folder"),
    ],
)
def test_mistakes_get_a_message_and_an_exit_code(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("cdrmix: error: ")
    assert message in error
    assert "Traceback" not in error
    assert main([*arguments, "--traceback"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys, cdrmix.cli; cdrmix.cli.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_two_processes_end_and_explain_themselves_as_one(arguments: Arguments, workspace: Path) -> None:
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--nproc", "2"]
    command += arguments(f"run.root={workspace / 'two'}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (path,) = (workspace / "two").iterdir()
    assert done.stdout.splitlines()[-1] == str(path)
    assert done.stdout.count("Stage A: ") == 1
    # Found wrong by the workers, not by the launcher: one message, the exit code of its kind, no stack trace.
    bad = subprocess.run([*command, "--resume", "nowhere"], capture_output=True, text=True, check=False, timeout=200)
    assert bad.returncode == 2
    assert bad.stderr.count("cdrmix: error: nowhere is not a run folder") == 1
    assert "Traceback" not in bad.stderr
    assert main(["train", "--nproc", "2", *arguments("train.batch_rows=1")]) == 2


def test_figures_that_json_does_not_know_are_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = HeldOut.of(Score(800.0, math.inf, 9.0, 10, 20), Baselines(3.0, 2.0, 1.0))
    monkeypatch.setattr("cdrmix.evaluate.evaluate_model", lambda *_, device: figures)
    assert main(["eval", "--model", "RUN", "--json"]) == 0
    out = capsys.readouterr().out
    assert "Infinity" not in out
    assert json.loads(out)["perplexity"] is None


@pytest.mark.parametrize("kind", [PermissionError, NotADirectoryError])
def test_a_place_that_cannot_be_used_is_a_mistake_with_a_message(
    kind: type[OSError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = {PermissionError: errno.EACCES, NotADirectoryError: errno.ENOTDIR}[kind]

    def refuse(model: Path, out: Path, *_: object) -> None:
        raise kind(number, os.strerror(number), str(out))

    monkeypatch.setattr(lifecycle, "export_to", refuse)
    assert main(["export", "--model", "RUN", "--out", "place"]) == 2
    assert capsys.readouterr().err == f"cdrmix: error: cannot use place: {os.strerror(number)}\n"


@pytest.mark.parametrize(
    ("module", "missing"),
    [("numba", True), ("absent_package.part", True), ("cdrmix.absent", False), ("json.absent", False)],
)
def test_a_package_that_is_not_installed_is_one_sentence(
    arguments: Arguments,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    missing: bool,
) -> None:
    if module == "numba":
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    monkeypatch.setattr("cdrmix.workflow.run_all", lambda *_: importlib.import_module(module))
    if not missing:
        with pytest.raises(SystemExit) as left:
            main(["train", *arguments()])
        assert left.value.code == 70
        return
    assert main(["train", *arguments()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the package {module.partition('.')[0]}, which this command needs, is not installed for" in line


def test_what_nobody_foresaw_is_not_taken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("cdrmix.compare.compare", fail)
    with pytest.raises(SystemExit) as caught:
        main(["compare", "a", "b"])
    assert caught.value.code == 70
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "RuntimeError: a mistake of ours" in error
    assert "cdrmix: error: " in error


def test_a_reasoning_run_says_that_the_backbone_alone_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("_prepare", "_train", "_after_training"):
        monkeypatch.setattr(lifecycle, step, lambda *_: None)
    without_phases = [f"reasoning.phases.{name}.steps=0" for name, _ in Phases()]
    for kind, overrides in (("reason", without_phases), ("core", [])):
        config = ROOT / "configs" / f"cdrmix-{kind}-tiny.yaml"
        assert main(["train", "--config", str(config), f"run.root={tmp_path / kind}", *overrides]) == 0
        (path,) = (tmp_path / kind).iterdir()
        assert (STAGE_A_ONLY in capsys.readouterr().out) == (kind == "reason")
        assert RunFolder.open(path).summary().get("not_trained") == (STAGE_A_ONLY if kind == "reason" else None)
        page = write_report(RunFolder.open(path)).read_text()
        assert ("Only stage A (the backbone)" in page) == (kind == "reason")
