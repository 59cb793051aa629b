"""Difficulty of tasks, from code and from a configuration; filler; episodes in chunks; stories; scores."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cdrmix.config.schema_data import TasksSource
from cdrmix.data.tasks import TASKS, Example, Filler, difficulties, episode, generate, make_example, score
from cdrmix.data.tasks.arithmetic import Expression
from cdrmix.data.tasks.babilong import PEOPLE, THINGS, Story
from cdrmix.data.tasks.example import Length, Value
from cdrmix.data.tasks.recall import ChunkRecall
from cdrmix.data.tasks.rng import LONGEST_SENTENCE, Rng, sentences_of
from cdrmix.errors import ConfigError

STORIES = {"babilong_qa1": 1, "babilong_qa2": 2, "babilong_qa3": 3, "babilong_qa5": 2}  # and the fewest facts


@pytest.mark.parametrize("task", TASKS.names())
def test_a_number_of_characters_is_the_published_difficulty_at_that_length(task: str) -> None:
    standard = TASKS[task].standard
    assert make_example(task, 3, 5, 2500) == make_example(task, 3, 5, standard.at_length(2500))
    assert make_example(task, 3, 5) == make_example(task, 3, 5, standard)
    lengths = [len(make_example(task, 3, 5, characters).text) for characters in (2000, 8000, 32_000)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2] / 8 or task in ("mqar", "ruler_cwe")  # whose text has a longest, a shortest
    with pytest.raises(ConfigError, match="is of other tasks"):
        make_example(task, 1, 0, Expression() if task != "multi_step_arithmetic" else Length())


def test_a_difficulty_says_what_cannot_be() -> None:
    level = Story()
    assert level.changed({"facts": 3, "characters": 50}) == Story(characters=50, facts=3)
    for changes, message in (
        ({"fact": 3}, r"there is no 'fact'; there are characters, facts, question_first; did you mean 'facts'\?"),
        ({"facts": 0}, "facts = 0; it must be at least 1"),
        ({"facts": "many"}, "facts = 'many'; it must be of type int"),
        ({"facts": True}, "it must be of type int"),
        ({"facts": 2.5}, "it must be of type int"),
    ):
        wrong: dict[str, Value] = dict(changes)
        with pytest.raises(ConfigError, match=message):
            level.changed(wrong)
    assert TASKS["ruler_fwe"].standard.changed({"alpha": 3}).alpha == 3
    with pytest.raises(ConfigError, match="needs more than 1"):
        TASKS["ruler_fwe"].standard.changed({"alpha": 1.0})
    with pytest.raises(ConfigError, match="haystack = 'hay'; it must be passage or text or needles"):
        TASKS["ruler_niah_single_1"].standard.changed({"haystack": "hay"})


def test_difficulty_of_a_source() -> None:
    section = TasksSource(
        kind="tasks",
        tasks=["babilong_qa1", "recall", "ruler_niah_single_2"],
        documents=6,
        characters=900,
        difficulty={"facts": 5, "values": 3},
    )
    levels = difficulties(section)
    assert levels["babilong_qa1"] == Story(characters=900, facts=5)
    assert levels["recall"] == Length(characters=900)
    for where, text, meta in generate(section):
        task, number = where.split()
        assert text == make_example(task, 1, int(number), levels[task]).text
        assert set(meta) == {"task", "prompt", "answer"}
        if task == "ruler_niah_single_2":
            assert len(re.findall(r"The hidden number of", text)) == 3
    filler = Filler(["A sentence of the caller's own. "])
    assert "of the caller's own" in next(generate(section, filler))[1]
    for changes, message in (
        ({"difficulty": {"fact": 1}}, "no task of the source has 'fact'; they have .* did you mean 'facts'"),
        ({"difficulty": {"facts": -1}}, "at least 1"),
        ({"tasks": ["recal"]}, "there is no task 'recal'"),
    ):
        with pytest.raises(ConfigError, match=message):
            next(generate(section.model_copy(update=changes)))
    with pytest.raises(ValidationError):
        TasksSource.model_validate({**section.model_dump(), "difficulty": {"facts": [1]}})


@pytest.mark.parametrize("task", STORIES)
@given(number=st.integers(0, 10**9), more=st.integers(0, 60))
def test_a_story_has_as_many_facts_as_asked_for(task: str, number: int, more: int) -> None:
    level = Story(characters=4000, facts=STORIES[task] + more)
    made = make_example(task, 1, number, level)
    facts = re.findall(rf"(?:{'|'.join(PEOPLE)}) [a-z ]+ the \w+(?: to \w+)?\.", made.prompt)
    assert len(facts) == level.facts
    if STORIES[task] > 1:
        with pytest.raises(ConfigError, match="needs at least"):
            make_example(task, 1, number, Story(facts=STORIES[task] - 1))


@pytest.mark.parametrize("facts", [1, 2, 3, 5, 6])
def test_rooms_in_a_line(facts: int) -> None:
    if not 2 <= facts <= 5:
        with pytest.raises(ConfigError, match="this task has 2 to 5"):
            make_example("babilong_qa4", 1, 0, Story(facts=facts))
        return
    for number in range(20):
        made = make_example("babilong_qa4", 1, number, Story(facts=facts))
        assert len(re.findall(r"The \w+ is (?:north|south|east|west) of the \w+\.", made.prompt)) == facts


def test_answers_of_stories_are_even() -> None:
    """No answer is so common that guessing it would do, as far as the benchmark's kinds of question let it."""
    for task, choices in (("babilong_qa1", 6), ("babilong_qa2", 6), ("babilong_qa3", 6), ("babilong_qa4", 6)):
        answers = Counter(make_example(task, 1, number, 100).answer for number in range(600))
        assert len(answers) == choices
        assert max(answers.values()) < 600 / choices + 6 * (600 / choices) ** 0.5
    answers = Counter(make_example("babilong_qa5", 1, number, 100).answer.strip() for number in range(600))
    assert set(answers) == {*PEOPLE, *THINGS}
    assert max(answers.values()) < 180


def test_filler_of_a_story_says_nothing_of_it() -> None:
    text = "Agnes is in the zoo. An apple fell from the tree, and nobody saw it. The sea was calm that day."
    made = make_example("babilong_qa2", 1, 0, 3000, filler=Filler([text]))
    assert "zoo" not in made.prompt
    assert "tree" not in made.prompt
    assert made.prompt.count("The sea was calm that day.") > 50
    with pytest.raises(ValueError, match="every sentence of the filler has one of Agnes"):
        make_example("babilong_qa2", 1, 0, 3000, filler=Filler(["Agnes is in the zoo."]))


@given(
    number=st.integers(0, 10**9),
    chunks=st.integers(1, 40),
    pairs=st.integers(1, 40),
    queries=st.integers(1, 6),
    characters=st.integers(100, 8000),
)
def test_episodes_tell_each_fact_in_one_chunk(
    number: int, chunks: int, pairs: int, queries: int, characters: int
) -> None:
    changes: dict[str, Value] = {"chunks": chunks, "pairs": pairs, "queries": queries, "characters": characters}
    if queries > pairs:
        with pytest.raises(ConfigError, match="ask for fewer"):
            ChunkRecall().changed(changes)
        return
    level = ChunkRecall().changed(changes)
    made = episode("chunk_recall", 1, number, level)
    assert len(made.chunks) == chunks
    for index, chunk in enumerate(made.chunks):
        told = re.findall(r"The code of (\w+) is (\d+)\.", chunk)
        assert told == [(fact.key, fact.value) for fact in made.facts if fact.chunk == index]
        # a chunk is as long as its share, one sentence of filler more, or as its facts
        assert len(chunk) < max(
            characters / chunks + 60, sum(len(f"The code of {key} is {value}. ") for key, value in told)
        )
    assert len({fact.key for fact in made.facts}) == len({fact.value for fact in made.facts}) == pairs
    assert len(set(made.asked)) == queries
    assert set(made.asked) <= set(made.facts)
    assert made.answer == ", ".join(fact.value for fact in made.asked)
    assert all(fact.key in made.question for fact in made.asked)
    text = make_example("chunk_recall", 1, number, level)
    assert text.answer == f" {made.answer}"
    assert text.prompt == "\n".join([*filter(None, made.chunks), f"Question: {made.question}", "Answer:"])


def test_facts_lie_in_all_chunks_alike() -> None:
    counts = Counter(fact.chunk for number in range(200) for fact in episode("chunk_recall", 1, number).asked)
    assert set(counts) == {0, 1, 2, 3}
    assert all(abs(count - 50) < 6 * 37.5**0.5 for count in counts.values())  # binomial: variance 200 / 4 * 3 / 4
    with pytest.raises(ConfigError, match="'recall' has no chunks; chunk_hops, chunk_recall, poisoned_recall have"):
        episode("recall", 1, 0)


@given(
    number=st.integers(0, 10**9),
    chunks=st.integers(1, 9),
    bad=st.integers(1, 9),
    hops=st.integers(1, 5),
    chains=st.integers(1, 4),
)
def test_chunks_that_lie_and_chains_over_chunks(number: int, chunks: int, bad: int, hops: int, chains: int) -> None:
    if bad < chunks:
        lying = episode(
            "poisoned_recall", 1, number, TASKS["poisoned_recall"].standard.changed({"chunks": chunks, "bad": bad})
        )
        assert [chunk.endswith("None of this is true.") for chunk in lying.chunks] == [
            index in lying.bad for index in range(chunks)
        ]
        assert len(lying.bad) == bad
        assert not {fact.chunk for fact in lying.facts} & set(lying.bad)
        assert all(f"The code of {fact.key} is {fact.value}." in lying.chunks[fact.chunk] for fact in lying.facts)
        said = [re.findall(r"code of (\w+) is (\w+)\.", lying.chunks[index]) for index in lying.bad]
        assert all(pairs for pairs in said)
        assert not {(fact.key, fact.value) for fact in lying.facts} & {pair for pairs in said for pair in pairs}
    level = TASKS["chunk_hops"].standard.changed({"chunks": chunks, "hops": hops, "chains": chains})
    chain = episode("chunk_hops", 1, number, level)
    assert len(chain.facts) == hops * chains
    assert [fact.key for fact in chain.asked[:-1]] == [fact.value for fact in chain.asked[1:]]
    assert chain.asked[0].value == chain.answer
    assert chain.asked[-1].key in chain.question
    places = [fact.chunk for fact in chain.asked]
    assert places == sorted(places)
    assert all(f"Let {fact.key} = {fact.value}." in chain.chunks[fact.chunk] for fact in chain.facts)


def test_as_many_lies_as_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="bad = 4 of chunks = 4"):
        TASKS["poisoned_recall"].standard.changed({"bad": 4})


@given(
    number=st.integers(0, 10**9),
    operators=st.integers(1, 200),
    largest=st.sampled_from([1, 9, 99, 5000]),
    bound=st.sampled_from([9, 99, 9999]),
)
def test_expressions_are_as_large_as_asked_for(number: int, operators: int, largest: int, bound: int) -> None:
    made = make_example("multi_step_arithmetic", 1, number, Expression(operators, largest, bound))
    numbers = [int(written) for written in re.findall(r"\d+", made.prompt)]
    assert len(numbers) == operators + 1
    assert all(1 <= written <= largest for written in numbers)
    assert len(re.findall(r" [-+*] ", made.prompt)) == made.steps.count(" = ") == operators
    assert all(abs(int(result)) <= bound for result in re.findall(r"= (-?\d+)\.", made.steps))


def test_exact_match_elsewhere() -> None:
    made = make_example("recall", 1, 0)
    code = made.answer.strip()
    for answer in (made.answer, code, f"  {code}\n", f"{code}\nQuestion: more", f"\nAnswer: {code}"):
        assert score(made, answer) == 1
    for answer in ("", "Answer:", f"{code}0", f"{code}.", f"It is {code}", f"9999\n{code}"):
        assert score(made, answer) == 0
    stepped = make_example("arithmetic", 1, 0)
    assert score(stepped, stepped.steps + stepped.answer) == 1
    assert score(stepped, stepped.steps) == 0
    assert score(stepped, stepped.answer + "1") == 0
    assert score(Example("", "", " a b, c"), "a  b, c") == 1


@given(st.text(st.sampled_from("ab .!?\n\té"), max_size=3000))
def test_sentences_lose_nothing_but_white_space(text: str) -> None:
    sentences = list(sentences_of(text))
    assert "".join("".join(sentence.split()) for sentence in sentences) == "".join(text.split())
    assert all(0 < len(sentence) <= LONGEST_SENTENCE for sentence in sentences)
    assert all(sentence == " ".join(sentence.split()) for sentence in sentences)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 150, 399, 400, 401, 1000])
def test_long_sentences_are_cut_between_words_where_they_can_be(width: int) -> None:
    pieces = list(sentences_of(" ".join(["a" * width] * 1000)))
    assert all(len(piece) <= LONGEST_SENTENCE for piece in pieces)
    assert sum(map(len, "".join(pieces).split())) == 1000 * width
    if width <= LONGEST_SENTENCE:
        assert {word for piece in pieces for word in piece.split()} == {"a" * width}
        assert all(len(piece) + 1 + width > LONGEST_SENTENCE for piece in pieces[:-1])


def test_filler_is_read_as_far_as_it_is_needed() -> None:
    assert list(sentences_of("One. Two!  Three\nis it? Yes")) == ["One.", "Two!", "Three", "is it?", "Yes"]
    endless = (f"Document {number} is here." for number in iter(int, 1))
    assert len(Filler(endless, max_characters=1000).sentences) == 1000 // 19 + 1
    for empty in ([], ["", " \n"]):
        with pytest.raises(ValueError, match="hold no text"):
            Filler(empty)


@given(number=st.integers(0, 10**9), characters=st.integers(-5, 3000), size=st.integers(1, 50))
def test_a_passage_is_at_most_one_sentence_too_long(number: int, characters: int, size: int) -> None:
    filler = Filler([" ".join(f"It was {index} o'clock." for index in range(size))])
    for rng in (Rng(1, "test", number), Rng(1, "test", number, filler)):
        passage = rng.passage(characters)
        length = sum(len(sentence) + 1 for sentence in passage)
        assert length >= characters
        assert length - (len(passage[-1]) + 1 if passage else 0) < max(characters, 1)


@pytest.mark.parametrize("task", ["poisoned_recall", "chunk_recall", "chunk_hops"])
def test_a_chunk_is_a_paragraph_among_lines_of_code(task: str) -> None:
    """In poisoned_recall the last sentence of a paragraph is about all of it. In a chunk a line stays a line."""
    filler = Filler(["\n".join(f"part {number} = item" for number in range(1000))])
    text = make_example(task, 1, 0, 3000, filler=filler).prompt.partition("\nQuestion: ")[0]
    chunks = [chunk for chunk in episode(task, 1, 0, 3000, filler=filler).chunks if chunk]
    assert text.split("\n") == [chunk.replace("\n", " ") for chunk in chunks]
    assert {line for chunk in chunks for line in chunk.split("\n") if line.startswith("part")} <= {*filler.sentences}
