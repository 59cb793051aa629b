"""Tasks of lm-eval whose data cdrmix makes: held-out text, and recall as generation and as multiple choice.

`write_tasks` writes them to a folder as every task of lm-eval is written: a YAML file, and its data as JSON lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.data.tasks import make_example
from cdrmix.eval.tasks import FIRST_HELD_OUT

HELD_OUT, RECALL, RECALL_CHOICE = "cdrmix_held_out", "cdrmix_recall", "cdrmix_recall_choice"
NAMES = (HELD_OUT, RECALL, RECALL_CHOICE)
QUESTIONS, EXAMPLES = 100, 16  # of a task; examples for few-shot prompts
CHARACTERS = 800  # of a question: four names with their codes
SEED = 1
CODE = re.compile(r"\b(\d{4})\.")  # in a fact of a question

_TASKS: Mapping[str, Mapping[str, Any]] = {
    HELD_OUT: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        ],
    },
    RECALL: {
        "output_type": "generate_until",
        "training_split": "train",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "filter_list": [{"name": "answer", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    RECALL_CHOICE: {
        "output_type": "multiple_choice",
        "training_split": "train",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(names: Sequence[str], folder: Path, held_out: Callable[[], Iterable[str]]) -> None:
    """Writes the tasks with these names, which are of NAMES, and their data to a folder that exists.

    held_out: gives the texts of the held-out documents; it is called only for the task that needs them.
    """
    for name in names:
        rows = {"test": _held_out_rows(held_out())} if name == HELD_OUT else _recall_splits()
        files = {}
        for split, documents in rows.items():
            path = folder / f"{name}.{split}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(document) + "\n" for document in documents)
            files[split] = str(path)
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "metadata": {"version": 1},
            **_TASKS[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def _held_out_rows(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        yield {"text": text}


def _recall_splits() -> dict[str, Iterator[dict[str, Any]]]:
    return {
        "test": _recall_rows(range(QUESTIONS)),
        "train": _recall_rows(range(QUESTIONS, QUESTIONS + EXAMPLES)),
    }


def _recall_rows(numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Questions of the task recall that no training has. choices: the codes of the text. gold: that of the answer."""
    for number in numbers:
        made = make_example("recall", SEED, FIRST_HELD_OUT + number, CHARACTERS)
        answer = made.answer.strip()
        choices = sorted(set(CODE.findall(made.prompt)))
        yield {"prompt": made.prompt, "answer": answer, "choices": choices, "gold": choices.index(answer)}
