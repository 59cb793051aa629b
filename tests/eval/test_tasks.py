"""Evaluations by length: questions of the tokens asked for, right and wrong answers, the registry, mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cdrmix.data.tasks import TASKS, make_example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, VocabularyError
from cdrmix.eval.evaluation import EVALUATIONS, Question, Scores, evaluate_by_length, evaluations
from cdrmix.report.plots_tasks import draw_scores


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    texts = [path.read_text() for path in sorted((Path(__file__).parents[2] / "cdrmix").rglob("*.py"))]
    return TextTokenizer.train(texts, vocab_size=1024, end_of_text="<|endoftext|>")


class Person:
    """Answers by looking the questions up; knows those of at most `longest` characters."""

    def __init__(self, longest: int = 10**9) -> None:
        self.longest = longest
        self.batches: list[list[str]] = []
        self.limits: list[int] = []
        self.known: dict[str, str] = {}

    def __call__(self, prompts: Sequence[str], limits: Sequence[int]) -> list[str]:
        self.batches.append(list(prompts))
        self.limits += limits
        return [self.known[prompt] if len(prompt) <= self.longest else " nothing" for prompt in prompts]


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Person:
    """Somebody who sees every question when it is made."""
    found = Person()
    for name in evaluations(["all"]):
        made = EVALUATIONS[name]

        def ask(seed: int, number: int, characters: int, made: Callable[..., Question] = made) -> Question:
            question = made(seed, number, characters)
            found.known[question.prompt] = question.answer
            return question

        monkeypatch.setitem(EVALUATIONS._entries, name, ask)
    return found


def scored(
    names: Sequence[str], lengths: Sequence[int], person: Person, tokenizer: TextTokenizer, **more: int
) -> Scores:
    arguments = {"count": 3, "seed": 1, "training_length": 512} | more
    return evaluate_by_length(evaluations(names), lengths, person, tokenizer, say=lambda line: None, **arguments)


def test_right_answers_score_one_at_every_length(person: Person, tokenizer: TextTokenizer) -> None:
    found = scored(["all"], [512, 2048], person, tokenizer)
    assert set(found.names) == set(TASKS.names())
    for score in found.scores:
        if score.problem is None:
            assert (score.accuracy, score.standard_error, score.count) == (1.0, 0.0, 3), score
            assert score.mean_tokens is not None
            assert 0.25 * score.tokens <= score.mean_tokens <= score.tokens
    assert sum(score.problem is not None for score in found.scores) < 5
    longest = max(len(tokenizer.encode(answer)) for answer in person.known.values())
    assert max(person.limits) <= longest + 8


def test_what_is_known_of_short_questions_alone_shows_by_length(person: Person, tokenizer: TextTokenizer) -> None:
    person.longest = 3000
    found = scored(["recall", "ruler_vt"], [4096, 512], person, tokenizer)
    assert found.lengths == [512, 4096]
    assert [found.at("recall", tokens).accuracy for tokens in found.lengths] == [1.0, 0.0]
    assert found.notes == ["4k: longer than the 512 tokens of a row in training"]
    assert "recall        1.000    0.000" in found.table()
    person.longest = 0
    assert {score.accuracy for score in scored(["recall"], [512], person, tokenizer).scores} == {0.0}


def test_questions_depend_on_seed_and_number_alone(person: Person, tokenizer: TextTokenizer) -> None:
    def prompts(**more: int) -> list[str]:
        person.batches = []
        scored(["babilong_qa1"], [512], person, tokenizer, **more)
        return [prompt for batch in person.batches for prompt in batch]

    assert prompts(count=5)[:2] == prompts(count=2)
    assert not set(prompts(count=4)) & set(prompts(count=4, seed=2))


def test_questions_are_no_examples_of_a_training() -> None:
    """A training generates examples from number 0 on."""
    for task in TASKS.names():
        trained = {make_example(task, 1, number, 300).prompt for number in range(4)}
        assert not trained & {EVALUATIONS[task](1, number, 300).prompt for number in range(4)}, task


def test_prompts_are_answered_in_batches_of_bounded_size(person: Person, tokenizer: TextTokenizer) -> None:
    scored(["recall"], [1024, 8192], person, tokenizer, count=20)
    sizes = [len(batch) for batch in person.batches]
    assert sizes == [16, 4, *[2] * 10]  # 16,384 tokens at once


def test_a_length_that_a_task_cannot_make(person: Person, tokenizer: TextTokenizer) -> None:
    found = scored(["mqar"], [1024, 16384], person, tokenizer)
    assert found.at("mqar", 1024).accuracy == 1.0
    assert "its longest question up to this length has only" in str(found.at("mqar", 16384).problem)
    assert found.notes[0].startswith("mqar at 16k: its longest question")
    (mean,) = (score.mean_tokens for score in found.scores if score.mean_tokens)
    assert found.notes[1] == f"mqar at 1k: the mean length of its questions is {mean:,.0f} tokens"
    (problem,) = scored(["ruler_cwe"], [256], person, tokenizer).problems  # the command refuses: tests/cli
    assert re.match(r"ruler_cwe at 256: its shortest question has 2,\d+ tokens", problem)


def test_names_families_and_mistakes() -> None:
    assert evaluations(["recall", "babilong", "recall"]) == ["recall", *(f"babilong_qa{n}" for n in range(1, 6))]
    assert evaluations(["all"]) == EVALUATIONS.names()
    with pytest.raises(
        ConfigError, match=r"no task 'recal'; did you mean 'recall'\? The tasks are arithmetic, .*update"
    ):
        evaluations(["recall", "recal"])
    with pytest.raises(ConfigError, match=r"did you mean 'babilong'\?"):
        evaluations(["babilon"])


@pytest.fixture
def echo() -> Iterator[None]:
    @EVALUATIONS("echo")
    def echo(seed: int, number: int, characters: int) -> Question:
        word = f"{seed}-{number}"
        return Question(f"{'-' * characters} Say {word}:", word, lambda answer: float(answer == word))

    yield
    del EVALUATIONS._entries["echo"]


@pytest.mark.usefixtures("echo")
def test_one_entry_adds_an_evaluation(tokenizer: TextTokenizer) -> None:
    def answer(prompts: Sequence[str], limits: Sequence[int]) -> list[str]:
        return [prompt.rpartition(" ")[2].rstrip(":") for prompt in prompts]

    (score,) = evaluate_by_length(
        evaluations(["echo"]), [256], answer, tokenizer, count=2, seed=7, training_length=256, say=print
    ).scores
    assert score.accuracy == 1.0


def test_text_that_the_tokenizer_cannot_write(
    person: Person, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda text: [])
    with pytest.raises(VocabularyError, match="recall: the model's tokenizer cannot encode the text"):
        scored(["recall"], [256], person, tokenizer)


def test_the_picture_is_the_same_every_time(person: Person, tokenizer: TextTokenizer) -> None:
    person.longest = 3000
    found = scored(["recall", "mqar"], [512, 4096], person, tokenizer)
    picture = draw_scores(found, title="somebody")
    assert picture.startswith(b"\x89PNG")
    assert draw_scores(found, title="somebody") == picture
