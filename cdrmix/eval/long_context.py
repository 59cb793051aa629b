"""The suite `long`: answers to questions of RULER, BABILong and MQAR at 1, 2 and 4 times the training's row length.

The questions are those of `cdrmix eval --tasks ruler,babilong,mqar`, and so are the scores.
TASK_1x, TASK_2x, TASK_4x: the mean score of a task; the rows in training had 1x tokens.
accuracy_1x, accuracy_2x, accuracy_4x: the mean over the tasks that have questions of each length that the model reads.
Intervals: Wilson's, 95 %. A score is a share from 0 to 1. Its variance is at most that of a right or wrong answer with
the same mean, so for such scores the interval is rather too wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cdrmix.errors import CdrmixError
from cdrmix.eval.evaluation import Score, evaluate_by_length, evaluations
from cdrmix.eval.intervals import wilson
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult

QUESTIONS = ("ruler", "babilong", "mqar")
TIMES = (1, 2, 4)
COUNT = 20  # questions of each task and length; at core-tiny all take about a minute


@SUITES("long")
def long(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module."""
    parts = subject.model_parts("long")
    row = parts.config.data.row_length
    lengths = [times * row for times in TIMES]
    scores: list[list[Score]] = []  # of a task, the three lengths
    for name in evaluations(QUESTIONS):
        scores.append([])
        for tokens in lengths:
            try:
                found = evaluate_by_length(
                    [name],
                    [tokens],
                    parts.answer,
                    parts.tokenizer,
                    count=options.limit or COUNT,
                    seed=options.seed,
                    training_length=row,
                    say=say,
                ).scores[0]
            except CdrmixError as error:  # a text that the tokenizer or the model cannot take
                found = Score(name, tokens, problem=str(error))
            scores[-1].append(found)
    # A model with a table of positions reads no longer texts, so that no task has scores there.
    read = [place for place in range(len(TIMES)) if any(of_task[place].accuracy is not None for of_task in scores)]
    complete = [of_task for of_task in scores if read and all(of_task[place].accuracy is not None for place in read)]
    measures = [
        _mean(times, [of_task[place] for of_task in complete if place in read]) for place, times in enumerate(TIMES)
    ]
    for of_task in scores:
        measures += [_measure(f"{score.name}_{times}x", score) for times, score in zip(TIMES, of_task, strict=True)]
    facts = {
        "row_length": row,
        "lengths": {f"{times}x": tokens for times, tokens in zip(TIMES, lengths, strict=True)},
        "seed": options.seed,
        "tasks_of_accuracy": [of_task[0].name for of_task in complete],
        "mean_tokens": {
            f"{score.name}_{times}x": score.mean_tokens
            for of_task in scores
            for times, score in zip(TIMES, of_task, strict=True)
        },
    }
    # A model of transformers that cdrmix did not train has step 0: its row length is what its config.json says.
    origin = "was trained on rows of" if parts.step else "reads, as its configuration says, rows of"
    notes = [
        f"1x = {row:,} tokens: the model {origin} {row:,} tokens. 2x = {lengths[1]:,} and 4x = {lengths[2]:,} tokens "
        "are longer than these.",
        f"accuracy_1x, _2x, _4x: the mean of the same {len(complete)} of {len(scores)} tasks, those with questions of "
        "all of these lengths.",
    ]
    return SuiteResult("long", tuple(measures), facts, tuple(notes))


def _measure(name: str, score: Score) -> Measure:
    if score.accuracy is None:
        return Measure(name, problem=score.problem)
    return Measure(name, score.accuracy, *wilson(score.accuracy * score.count, score.count), score.count)


def _mean(times: int, scores: Sequence[Score]) -> Measure:
    """The mean over tasks with the same number of questions. Wilson's interval is rather too wide for it, because the
    variance within tasks is at most the variance of all questions."""
    name = f"accuracy_{times}x"
    if not scores:
        return Measure(name, problem="no task was measured at this and the other lengths; see each task")
    count = sum(score.count for score in scores)
    right = sum((score.accuracy or 0.0) * score.count for score in scores)
    return Measure(name, right / count, *wilson(min(right, count), count), count)
