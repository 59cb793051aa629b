"""`cdrmix eval --harness`: tasks of lm-eval on models of cdrmix and of transformers, against lm-eval's own class."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from in_process import main
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.data.tasks import make_example
from cdrmix.eval.perplexity import loss_model_nats
from cdrmix.hf import harness, harness_tasks
from cdrmix.hf.auto import register
from cdrmix.hf.export import export_model
from cdrmix.hf.harness_model import HarnessModel, prompts_begin
from cdrmix.hf.load import load_trained
from cdrmix.inference.load import Loaded
from cdrmix.model.language_model import LanguageModel

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
TOY = (
    "run.threads=1",
    "model.vocab_size=320",
    "model.d_model=32",
    "model.layers=2",
    "model.attention_fraction=0.5",
    "model.attention.heads=1",
    "model.attention.kv_heads=1",
    "model.feed_forward.hidden=16",
    "model.feed_forward.experts=4",
    "data.row_length=256",
    "data.valid_fraction=0.25",
    "data.source.kind=text",
)
LENGTH = 24  # tokens that the models of the comparison read
PAIRS = [
    ("def f(x):\n    return", " x"),
    ("def f(x):\n    return", " x + 1"),
    ("def f(x):\n    return ", "x + 1"),  # a space at the end of the context
    ("def g", "(y): pass"),
    ("", "print(1)"),
    ("a very long question that does not fit in the tokens that the model reads\n" * 3, "print(f(2))"),
]
DOCUMENTS = ["def f(x):\n    return x\n", "print(1)", "x = 1\n" * 40, "# a comment of some words\n" * 15]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, whose documents are shorter than a row, and a folder of tasks."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "text").mkdir()
    for number in range(24):
        lines = [f"def f{number}_{line}(x):\n    return x + {line}\n" for line in range(1 + number % 5)]
        (folder / "text" / f"{number}.py").write_text("\n".join(lines))
    write_task(folder / "tasks", "toy_choice", output_type="multiple_choice", doc_to_choice="{{choices}}")
    return folder


def write_task(folder: Path, name: str, **changes: Any) -> None:
    """A task of three questions."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"def f{n}(x):\n    return", "choices": ["x", "y", "(x, x)"], "answer": n} for n in range(3)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | changes))


@pytest.fixture(scope="module")
def shards(folder: Path) -> ShardSet:
    return prepare(config_of(folder), say=lambda text: None)


def config_of(folder: Path) -> Config:
    where = [f"data.source.paths=[{folder / 'text'}]", f"data.cache={folder / 'cache'}", f"run.root={folder / 'runs'}"]
    return Config.from_yaml(TINY, [*TOY, *where])


@pytest.fixture(scope="module")
def export(folder: Path, shards: ShardSet) -> Path:
    """An exported model of cdrmix with random weights, none of them 0."""
    config = config_of(folder)
    torch.manual_seed(1)
    model = LanguageModel(config.cdrmix_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return export_model(Loaded(model.eval().requires_grad_(False), shards.tokenizer, config, 1), folder / "export")


@pytest.fixture(scope="module")
def llama(folder: Path, shards: ShardSet) -> Path:
    """A folder of transformers with random weights, whose tokenizer adds no token to a text."""
    return make_llama(folder / "llama", Tokenizer.from_buffer(shards.tokenizer.json_bytes))


@pytest.fixture(scope="module")
def begins(folder: Path, shards: ShardSet) -> Path:
    """The same, but the tokenizer puts a begin-of-text token before a text."""
    tokenizer = Tokenizer.from_buffer(shards.tokenizer.json_bytes)
    tokenizer.add_special_tokens(["<s>"])
    token = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token)])
    return make_llama(folder / "begins", tokenizer, bos_token="<s>")


def make_llama(path: Path, tokenizer: Tokenizer, **settings: str) -> Path:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    end_id = tokenizer.token_to_id("<|endoftext|>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), initializer_range=0.3, eos_token_id=end_id, bos_token_id=end_id, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    end = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", **end, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(whole))
    return path


def instances(kind: str, arguments: Sequence[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def ours(path: Path, *, batch_size: int) -> Any:
    """The model as lm-eval gets it."""
    loaded = load_trained(path)
    first = prompts_begin(loaded)
    return harness.language_model(
        HarnessModel(loaded.model, loaded.tokenizer, begins=first, max_length=LENGTH, batch_size=batch_size, say=print)
    )


def theirs(path: Path, **changes: Any) -> HFLM:
    """The class of lm-eval for a folder of transformers, or an export."""
    register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=2, device="cpu", **changes)


@pytest.mark.parametrize("folder_name", ["llama", "begins", "export"])
def test_answers_are_those_of_the_class_of_lm_eval(folder_name: str, request: pytest.FixtureRequest) -> None:
    """Log-likelihoods, also of what is too long, documents in windows, and continuations with stop strings.

    A document begins with one token that begins a text; lm-eval puts another one before that of the tokenizer.
    """
    path = request.getfixturevalue(folder_name)
    asked = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [(text,) for text in DOCUMENTS],
        "generate_until": [
            ("def f(x):", {"until": ["\n"], "max_gen_toks": 8}),
            ("print(", {"until": [], "max_gen_toks": 8, "do_sample": False}),
            (PAIRS[-1][0], {"until": ["x", "return"], "max_gen_toks": 12, "temperature": 0.0}),
        ],
    }
    judge, once = theirs(path), theirs(path, add_bos_token=False)
    models = [ours(path, batch_size=batch_size) for batch_size in (1, 4)]
    for kind, arguments in asked.items():
        expected = getattr(once if kind == "loglikelihood_rolling" else judge, kind)(instances(kind, arguments))
        for model in models:
            found = getattr(model, kind)(instances(kind, arguments))
            if kind == "generate_until":
                assert found == expected
                assert any(found)
            elif kind == "loglikelihood":
                assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
                assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-6)
            else:
                assert found == pytest.approx(expected, rel=1e-6)


def test_batches_do_not_change_the_answers(export: Path, llama: Path) -> None:
    for path in (export, llama):
        one, four = (ours(path, batch_size=size) for size in (1, 4))
        requests = instances("loglikelihood", PAIRS)
        assert [x for x, _ in one.loglikelihood(requests)] == pytest.approx(
            [x for x, _ in four.loglikelihood(requests)], rel=1e-6
        )
        texts = instances("loglikelihood_rolling", [(text,) for text in DOCUMENTS])
        assert one.loglikelihood_rolling(texts) == pytest.approx(four.loglikelihood_rolling(texts), rel=1e-6)


@pytest.mark.parametrize("folder_name", ["llama", "begins"])
def test_a_token_over_the_border_belongs_to_the_answer(folder_name: str, request: pytest.FixtureRequest) -> None:
    """Every cut of a text: the ids are those of the whole text, and nothing of the answer is left unscored.

    Where no token is over the border, they are those of lm-eval's own class, which cannot score the others.
    """
    path = request.getfixturevalue(folder_name)
    model, judge, crossed = ours(path, batch_size=1)._model, theirs(path), 0
    for text in (DOCUMENTS[0], "return x", "x  + 1"):
        whole = model.tokenizer.encode(text)
        for cut in range(1, len(text)):
            context, answer = model.pair(text[:cut], text[cut:])
            first = [model.first_id] if folder_name == "begins" or len(answer) == len(whole) else []
            assert [*context, *answer] == [*first, *whole]
            assert model.tokenizer.decode(answer).endswith(text[cut:])
            one_less = model.tokenizer.decode(answer[1:])
            assert len(one_less) < len(text) - len(text[:cut].rstrip())
            theirs_pair = judge._encode_pair(text[:cut], text[cut:])
            if model.tokenizer.encode(text[:cut].rstrip()) == whole[: len(whole) - len(answer)] and context != first:
                assert (context, answer) == theirs_pair
            else:
                crossed += 1
    assert crossed > 3


def test_a_task_whose_answers_join_the_question(export: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": "def f(x):\n    ret", "c": ["urn", "ain"], "a": 0}, {"q": "pri", "c": ["nt(", "or"], "a": 0}]
    write_task(
        folder / "joined", "toy_joined", output_type="multiple_choice", doc_to_text="{{q}}", doc_to_target="{{a}}"
    )
    (folder / "joined" / "toy_joined.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = json.loads((folder / "joined" / "toy_joined.yaml").read_text())
    task |= {"target_delimiter": "", "doc_to_choice": "{{c}}"}
    (folder / "joined" / "toy_joined.yaml").write_text(json.dumps(task))
    found = evaluated(capsys, export, "toy_joined", "--include", str(folder / "joined"))
    assert found["toy_joined", "acc"]["documents"] == 2


def test_held_out_text_as_cdrmix_eval(export: Path, shards: ShardSet, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents shorter than a row are one window for both; lm-eval does not predict the end-of-text token."""
    valid = shards.valid
    assert 3 <= valid.documents == len(list(valid.text()))
    assert all(piece.tokens == piece.document_tokens for row in range(valid.rows) for piece in valid.pieces(row))
    assert main(["eval", "--model", str(export), "--json"]) == 0
    held_out = json.loads(capsys.readouterr().out)
    loss_model = load_trained(export).loss_model().eval()

    def end_of_text_nats(batch: Batch) -> float:
        ends = (batch.targets_BT == valid.end_of_text_id) & (batch.weights_BT > 0)
        return loss_model_nats(loss_model, replace(batch, weights_BT=ends.float())).item()

    with torch.no_grad():
        ends = sum(map(end_of_text_nats, EvalLoader(valid, valid.row_length, 2)))
    nats = held_out["loss_nats_per_token"] * held_out["tokens"] - ends
    expected = nats / math.log(2) / held_out["text_bytes"]
    found = evaluated(capsys, export, "cdrmix_held_out")["cdrmix_held_out", "bits_per_byte"]
    assert found["value"] == pytest.approx(expected, rel=1e-6)
    assert found["value"] != pytest.approx(held_out["bits_per_byte"], rel=1e-3)
    assert (found["documents"], found["better"]) == (valid.documents, "lower")


def evaluated(capsys: pytest.CaptureFixture[str], path: Path, tasks: str, *options: str) -> dict[Any, Any]:
    """The scores of the command by task and metric."""
    capsys.readouterr()
    assert main(["eval", "--model", str(path), "--harness", tasks, *options, "--json"]) == 0
    return {(score["task"], score["metric"]): score for score in json.loads(capsys.readouterr().out)["scores"]}


def test_tasks_of_a_folder_and_of_cdrmix(
    export: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores as JSON and as a table, and the results of lm-eval in a file; nothing else is written."""
    names = "toy_choice,cdrmix_recall,cdrmix_recall_choice"
    options = ["--include", str(folder / "tasks"), "--limit", "2", "--few-shot", "1", "--batch-size", "3"]
    found = evaluated(capsys, export, names, *options, "--out", str(tmp_path / "full.json"))
    assert {key: score["documents"] for key, score in found.items()} == {
        ("toy_choice", "acc"): 2,
        ("cdrmix_recall", "exact_match"): 2,
        ("cdrmix_recall_choice", "acc"): 2,
    }
    assert {score["few_shot"] for score in found.values()} == {1}
    assert all(0 <= score["value"] <= 1 and score["standard_error"] >= 0 for score in found.values())
    full = json.loads((tmp_path / "full.json").read_text())
    assert full["results"]["toy_choice"]["acc,none"] == found["toy_choice", "acc"]["value"]
    questions = [sample["arguments"][0][0] for sample in full["samples"]["cdrmix_recall"]]
    assert all(question.count("Answer:") == 2 for question in questions)  # one is the example
    assert full["config"]["batch_size"] == 3
    assert main(["eval", "--model", str(export), "--harness", "toy_choice", *options]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["task", "metric", "value", "standard", "error", "few-shot", "documents"]
    assert second.split()[:3] == ["toy_choice", "acc", "↑"]


def test_the_recipe_of_the_documentation(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    blocks = re.findall(r"`tasks/(\S+)`:\n\n```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in blocks] == ["capitals.jsonl", "capitals.yaml", "capitals_text.yaml"]
    for name, text in blocks:
        (tmp_path / "tasks" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = evaluated(capsys, llama, "capitals,capitals_text", "--include", "tasks", "--few-shot", "1")
    assert {key: (score["documents"], score["few_shot"]) for key, score in found.items()} == {
        ("capitals", "acc"): (3, 1),
        ("capitals_text", "exact_match"): (3, 1),
    }


def test_recall_has_the_answer_among_its_choices(tmp_path: Path) -> None:
    harness_tasks.write_tasks(["cdrmix_recall_choice"], tmp_path, list)
    rows = [json.loads(line) for line in (tmp_path / "cdrmix_recall_choice.test.jsonl").read_text().splitlines()]
    assert len(rows) == harness_tasks.QUESTIONS
    assert all(row["choices"][row["gold"]] == row["answer"] and len(row["choices"]) == 4 for row in rows)
    assert len({row["gold"] for row in rows}) == 4


def test_recall_asks_neither_its_examples_nor_those_of_a_training(tmp_path: Path) -> None:
    harness_tasks.write_tasks(["cdrmix_recall"], tmp_path, list)
    asked, examples = (
        {json.loads(line)["prompt"] for line in (tmp_path / f"cdrmix_recall.{split}.jsonl").read_text().splitlines()}
        for split in ("test", "train")
    )
    assert (len(asked), len(examples)) == (harness_tasks.QUESTIONS, harness_tasks.EXAMPLES)
    assert not asked & examples
    numbers = range(harness_tasks.QUESTIONS + harness_tasks.EXAMPLES)  # a training generates examples from 0 on
    trained = {make_example("recall", harness_tasks.SEED, each, harness_tasks.CHARACTERS).prompt for each in numbers}
    assert not (asked | examples) & trained


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--harness", "toy_choise"], 2, "there is no task 'toy_choise'; did you mean 'toy_choice'?"),
        (["--harness", "hellaswagg"], 2, "there is no task 'hellaswagg'; did you mean 'hellaswag'?"),
        (["--harness", "toy_lost"], 3, "no data for the task toy_lost: "),
        (["--harness", "hellaswag"], 3, "no data for the task hellaswag: "),
        (["--harness", "toy_wrong"], 2, "lm-eval cannot make the task toy_wrong: "),
        (["--harness", "toy_unsafe"], 2, "the task toy_unsafe runs code that the model writes"),
        (["--harness", "toy_long"], 2, "a task asks for answers of up to 5,000 tokens, but the model reads 256"),
        (["--harness", "toy_beams"], 2, "generation_kwargs of a task have 'num_beams'; cdrmix knows do_sample, "),
        (["--harness", "toy_words"], 2, "have max_gen_toks: 'many'; allowed: a number of tokens"),
        (["--harness", "toy_hot"], 2, "top_p must be a number; found 'hot'"),
        (["--harness", "toy_until"], 2, "have until: 5; allowed: a string or a list of strings"),
        (["--harness", "toy_empty"], 2, "an answer of a task has no tokens"),
        (["--limit", "3"], 2, "--limit works only with --harness or --suite, for example --harness cdrmix_held_out"),
        (["--few-shot", "0"], 2, "--few-shot works only with --harness"),
        (["--online"], 2, "--online works only with --harness"),
        (["--harness", "a", "--tasks", "recall"], 2, "name one of the three"),
        (["--harness", "a", "--out", "/no/where/a.json"], 2, "--out /no/where/a.json: name a file in a folder"),
    ],
)
def test_what_is_refused(
    export: Path,
    folder: Path,
    options: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = Path(lm_eval.tasks.__file__).parent / "hellaswag"
    monkeypatch.setattr(harness, "_shipped_names", lambda: {"hellaswag": {shipped}})  # reading all takes seconds
    tasks = folder / "tasks"
    if not (tasks / "toy_lost.yaml").exists():
        write_task(tasks, "toy_lost", dataset_kwargs={"data_files": {"test": str(tasks / "lost.jsonl")}})
        write_task(tasks, "toy_wrong", output_type="multiple_choise")
        write_task(tasks, "toy_unsafe", output_type="multiple_choice", doc_to_choice="{{choices}}", unsafe_code=True)
        exact = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
        write_task(tasks, "toy_long", **exact, generation_kwargs={"max_gen_toks": 5000})
        write_task(tasks, "toy_beams", **exact, generation_kwargs={"num_beams": 4})
        write_task(tasks, "toy_words", **exact, generation_kwargs={"max_gen_toks": "many"})
        write_task(tasks, "toy_hot", **exact, generation_kwargs={"top_p": "hot", "do_sample": True})
        write_task(tasks, "toy_until", **exact, generation_kwargs={"until": 5})
        choices = "{{['a', '' if answer == 2 else 'b']}}"  # lm-eval itself refuses an empty one in the first document
        empty = {"doc_to_text": "", "target_delimiter": "", "doc_to_choice": choices, "doc_to_target": 0}
        write_task(tasks, "toy_empty", output_type="multiple_choice", **empty)
    include = ["--include", str(tasks)] if "--harness" in options else []
    assert main(["eval", "--model", str(export), *options, *include]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate"], ["eval", "--harness", "toy_choice"]])
def test_a_description_without_a_longest_text_is_refused(
    command: list[str], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(llama, tmp_path / "llama")
    described = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": -1}
    (folder / "config.json").write_text(json.dumps(described))
    assert main([*command, "--model", str(folder)]) == 2
    assert "config.json: max_position_embeddings: found -1; allowed: the number of tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_names_of_the_tasks_of_lm_eval(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks, groups and tags are found without lm-eval's index of all of them; openllm has members in other folders."""
    for name in ("hellaswag", "mmlu_anatomy", "mmlu", "ai2_arc", "arc_easy", "openllm"):
        assert main(["eval", "--model", str(export), "--harness", name]) == 3
        assert f"no data for the task {name}: " in capsys.readouterr().err
    assert main(["eval", "--model", str(export), "--harness", "mmlu_anatomi"]) == 2
    assert "there is no task 'mmlu_anatomi'; did you mean 'mmlu_anatomy'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_its_checkpoint_and_its_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model of transformers; the same numbers, which are those of the exported folder without cdrmix."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    steps = {"steps": 2, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 1e-3, "precision": "fp32"}
    config = {
        "run": {"name": "llama", "root": str(tmp_path / "runs"), "device": "cpu", "threads": 1},
        "model": {"kind": "huggingface", "random": {"model_type": "llama", "vocab_size": 320, **sizes}},
        "data": {
            "source": {"kind": "text", "paths": [str(folder / "text")]},
            "cache": str(tmp_path / "cache"),
            "row_length": 64,
            "valid_fraction": 0.25,
        },
        "train": {**steps, "evaluate_every": 2, "checkpoint_every": 2, "evaluate_rows": 4},
    }
    (tmp_path / "llama.yaml").write_text(json.dumps(config))
    assert main(["train", "--config", str(tmp_path / "llama.yaml")]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    paths = [run, run / "checkpoints" / "step-00000002", run / "export"]
    tasks = "cdrmix_held_out,cdrmix_recall_choice"
    first, *others = [evaluated(capsys, path, tasks, "--limit", "3") for path in paths]
    assert all(other == first for other in others)
    for name in ("SHA256SUMS", "config_snapshot.yaml"):
        (run / "export" / name).unlink()
    options = ["--config", str(tmp_path / "llama.yaml"), "--max-length", "64", "--limit", "3"]
    plain = evaluated(capsys, run / "export", tasks, *options)
    assert {key: score["value"] for key, score in plain.items()} == pytest.approx(
        {key: score["value"] for key, score in first.items()}, rel=1e-6
    )


def test_folders_that_cannot_be_used(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(tmp_path), "--harness", "cdrmix_recall"]) == 5
    assert "is not a run folder, a checkpoint or an exported model" in capsys.readouterr().err
    command = ["eval", "--model", str(export), "--harness", "cdrmix_recall", "--include", str(tmp_path / "none")]
    assert main(command) == 2
    assert "there is no such folder; name a folder with task files" in capsys.readouterr().err


def test_a_folder_of_transformers_has_no_text(llama: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is evaluated on the text of a configuration, by both commands; other tasks need none."""
    for options in ([], ["--harness", "cdrmix_held_out"]):
        assert main(["eval", "--model", str(llama), *options]) == 2
        assert "is not of cdrmix, so it has no text of its own: name a configuration by --config" in (
            capsys.readouterr().err
        )
    (folder / "text.yaml").write_text(config_of(folder).to_yaml())
    options = ["--config", str(folder / "text.yaml")]
    assert main(["eval", "--model", str(llama), *options, "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)["bits_per_byte"]
    found = evaluated(capsys, llama, "cdrmix_held_out", *options)["cdrmix_held_out", "bits_per_byte"]
    assert found["value"] == pytest.approx(packed, rel=0.1)  # without the end-of-text tokens
    assert main(["generate", "--model", str(llama), "--prompt", "def", "--max-new-tokens", "4"]) == 0


def test_without_lm_eval(export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--model", str(export), "--harness", "cdrmix_recall"]) == 2
    assert "pip install 'cdrmix[harness]'" in capsys.readouterr().err


def test_the_network_is_left_off_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with harness._quiet(online=False):
        assert huggingface_hub.is_offline_mode()
        assert datasets.config.HF_HUB_OFFLINE
    assert not huggingface_hub.is_offline_mode()
    with harness._quiet(online=True):
        assert not huggingface_hub.is_offline_mode()
