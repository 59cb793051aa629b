"""Tasks: every answer is what a solver that reads only the prompt finds; known ones stay the same bytes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.schema_data import TasksSource
from cdrmix.data.tasks import TASKS, THINK_BEGIN, THINK_END, Filler, generate, make_example, score
from cdrmix.data.tasks.babilong import World, before_questions, person_questions, story, thing_questions
from cdrmix.data.tasks.rng import Rng
from cdrmix.errors import ConfigError

ROOMS = "kitchen|cellar|attic|library|pantry|hall"


def question_of(prompt: str, pattern: str) -> str:
    found = re.search(rf"Question: {pattern}\n", prompt)
    assert found
    return found[1]


def solve_codes(prompt: str) -> str:
    """The latest code of the one who is asked for: recall and update."""
    name = question_of(prompt, r"What is the code of (\w+)(?: now)?\?")
    return re.findall(rf"code of {name} is (\d+)\.", prompt)[-1]


def solve_variables(prompt: str) -> str:
    value = question_of(prompt, r"Which variables have the value (\d+)\?")
    values: dict[str, str] = {}
    for name, source in re.findall(r"Let (\w+) = (\w+)\.", prompt):
        values[name] = values.get(source, source)
    return ", ".join(name for name, held in values.items() if held == value)


def solve_hops(prompt: str) -> str:
    asked = question_of(prompt, r"Who is ((?:the guard of )+\w+)\?")
    guards = dict(re.findall(r"The guard of (\w+) is (\w+)\.", prompt))
    name = asked.split()[-1]
    for _ in range(asked.count("the guard of")):
        name = guards[name]
    return name


def solve_arithmetic(prompt: str) -> str:
    start, *orders = re.findall(r"(Start with|Add|Subtract|Multiply by) (\d+)\.", prompt)
    value = int(start[1])
    for order, number in orders:
        value = {"Add": value.__add__, "Subtract": value.__sub__, "Multiply by": value.__mul__}[order](int(number))
    return str(value)


def solve_state(prompt: str) -> str:
    boxes = dict(re.findall(r"Box (\w+) holds ([a-z ]+)\.", prompt))
    for one, other in re.findall(r"Swap (\w+) and (\w+)\.", prompt):
        boxes[one], boxes[other] = boxes[other], boxes[one]
    return boxes[question_of(prompt, r"What does box (\w+) hold\?")]


def solve_sorting(prompt: str) -> str:
    numbers = re.findall(r"\d+", prompt)
    return " ".join(sorted(numbers, key=int))


def solve_copying(prompt: str) -> str:
    return prompt.split("\n")[0].removeprefix("Words: ")


def solve_many_codes(prompt: str) -> str:
    """The codes of all who are asked for: chunk_recall and the needles, of which a key may have several."""
    kind, names = re.search(r"Question: What (?:is|are|are all) the (?:hidden )?(\w+?)s? of (.+)\?\n", prompt).groups()  # type: ignore[union-attr]
    asked = re.split(r", | and ", names)
    return ", ".join(value for name in asked for value in re.findall(rf"{kind} of {name} is (\S+)\.(?:\s)", prompt))


def solve_among_lies(prompt: str) -> str:
    """As solve_many_codes, of the paragraphs that do not take back what they say."""
    return solve_many_codes(
        "\n".join(line for line in prompt.split("\n") if not line.endswith("None of this is true."))
    )


def solve_chain(prompt: str) -> str:
    """The number that a variable leads to."""
    told = dict(re.findall(r"Let (\w+) = (\w+)\.", prompt))
    name = re.search(r"value of (\w+)\?", prompt)[1]  # type: ignore[index]
    while name in told:
        name = told[name]
    return name


def solve_mqar(prompt: str) -> str:
    *words, last = question_of_line(prompt, "Pairs").split()
    return words[words.index(last) + 1]


def question_of_line(prompt: str, label: str) -> str:
    found = re.search(rf"^{label}: (.+)$", prompt, re.MULTILINE)
    assert found
    return found[1]


def solve_counts(prompt: str) -> str:
    """The words that come most often; of common words in the order of their first places."""
    text = prompt.split("\n")[1]
    words: list[str] = re.findall(r"[a-z]+", text)
    count = int(question_of(prompt, r"Which (\d+) words come most often in the .+"))
    common = [word for word, _ in Counter(words).most_common(count)]
    return ", ".join(sorted(common, key=words.index) if "numbered" in prompt else common)


def solve_parity(prompt: str) -> str:
    word = question_of(prompt, r"Is the number of times that (\w+) stands there even or odd\?")
    return ["even", "odd"][question_of_line(prompt, "Words").split().count(word) % 2]


def solve_orders(prompt: str) -> str:
    """Each order takes the letters of the row from where it takes those of the first row."""
    letters = prompt.split()[2]
    row = letters
    for order in question_of_line(prompt, "Orders").split():
        row = "".join(row[letters.index(letter)] for letter in order)
    return row


def solve_expression(prompt: str) -> str:
    text = f"({question_of(prompt, r'What is (.+)[?]')})"
    while "(" in text:  # innermost brackets first
        text = re.sub(
            r"\((-?\d+) ([-+*]) (-?\d+)\)",
            lambda part: str(
                {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[part[2]](int(part[1]), int(part[3]))
            ),
            text,
        )
    return text


def solve_story(prompt: str) -> str:
    """Reads the sentences forwards, knowing of nobody's place until they move."""
    places: dict[str, str] = {}
    carried: dict[str, str] = {}
    trails: dict[str, list[str | None]] = {}
    gifts: list[tuple[str, str, str]] = []
    text, question = prompt.split("\nQuestion: ")
    for person, verb, what, receiver in re.findall(
        r"(Agnes|Bruno|Clara|Edgar) ([a-z]+(?: up| down| to)?) the (\w+)(?: to (\w+))?\.", text
    ):
        if what in ROOMS.split("|"):
            assert verb in ("went to", "walked to", "moved to", "hurried to")
            places[person] = what
            for thing, holder in carried.items():
                if holder == person:
                    trails[thing].append(what)
        elif verb in ("put down", "dropped", "laid down", "set down"):
            assert carried.pop(what) == person
        else:
            assert carried.get(what) == (person if receiver else None)
            carried[what] = receiver or person
            trail = trails.setdefault(what, [])
            known = places.get(receiver or person)
            if not trail or trail[-1] is None:
                trail[-1:] = [known]
            assert trail[-1] == (known or trail[-1])
            if receiver:
                gifts.append((person, what, receiver))
    if found := re.match(r"Where is (\w+)\?", question):
        return places[found[1]]
    if found := re.match(r"Where is the (\w+)\?", question):
        return str(trails[found[1]][-1])
    if found := re.match(r"Where was the (\w+) before it was in the (\w+)\?", question):
        *_, before, last = trails[found[1]]
        assert last == found[2]
        assert trails[found[1]].count(last) == 1
        return str(before)
    patterns = (
        (r"Who gave the (\w+) to (\w+)\?", (1, 2), 0),
        (r"What did (\w+) give to (\w+)\?", (0, 2), 1),
        (r"To whom did (\w+) give the (\w+)\?", (0, 1), 2),
        (r"Who was given the (\w+)\?", (1,), 2),
        (r"Who gave the (\w+) away\?", (1,), 0),
    )
    for pattern, given_places, asked in patterns:
        if found := re.match(pattern, question):
            (answer,) = [gift[asked] for gift in gifts if tuple(gift[at] for at in given_places) == found.groups()]
            return answer
    raise AssertionError(question)


def solve_rooms(prompt: str) -> str:
    text, question = prompt.split("\nQuestion: ")
    other_side = {"north": "south", "south": "north", "east": "west", "west": "east"}
    next_to: dict[tuple[str, str], str] = {}  # (room, side) -> what lies there
    for one, side, other in re.findall(rf"The ({ROOMS}) is (\w+) of the ({ROOMS})\.", text):
        next_to[other, side] = one
        next_to[one, other_side[side]] = other
    if found := re.match(r"Which room is (\w+) of the (\w+)\?", question):
        return next_to[found[2], found[1]]
    found = re.match(r"Which room is the (\w+) (\w+) of\?", question)
    assert found
    return next_to[found[1], other_side[found[2]]]


SOLVERS: dict[str, Callable[[str], str]] = {
    "recall": solve_codes,
    "update": solve_codes,
    "variables": solve_variables,
    "hops": solve_hops,
    "arithmetic": solve_arithmetic,
    "state": solve_state,
    "sorting": solve_sorting,
    "copying": solve_copying,
    "chunk_recall": solve_many_codes,
    "poisoned_recall": solve_among_lies,
    "chunk_hops": solve_chain,
    "mqar": solve_mqar,
    "parity": solve_parity,
    "s3": solve_orders,
    "s5": solve_orders,
    "multi_step_arithmetic": solve_expression,
    "ruler_vt": solve_variables,
    "ruler_cwe": solve_counts,
    "ruler_fwe": solve_counts,
    **dict.fromkeys(["ruler_niah_single_1", "ruler_niah_single_2", "ruler_niah_single_3"], solve_many_codes),
    **dict.fromkeys(["ruler_niah_multikey_1", "ruler_niah_multikey_2", "ruler_niah_multikey_3"], solve_many_codes),
    **dict.fromkeys(["ruler_niah_multivalue", "ruler_niah_multiquery"], solve_many_codes),
    **dict.fromkeys(["babilong_qa1", "babilong_qa2", "babilong_qa3", "babilong_qa5"], solve_story),
    "babilong_qa4": solve_rooms,
}

# How long a text may be next_to what was asked for, where that is more than 1,000 characters; the longest of mqar has
# 512 tokens, the shortest list of common words 330
BOUNDS = {"mqar": (0.3, 1.0), "ruler_cwe": (0.7, 4.0)}
FILLER = Filler([" ".join(f"Nobody saw the boat number {n}, or so it is told. It was late!" for n in range(900))])

# SHA-256 of (prompt, steps, answer) for 12 numbers, three seeds and five lengths, from when they stood in one file
KNOWN = {
    "arithmetic": "f3a0f01df09876d03c30ce5cf7d450d2d1213f0002bf69f310c77dd59967bd9f",
    "copying": "b4cdcb9d03b90f55bcdc327c93f861624ab21ad6494815d7e3e5d469718611da",
    "hops": "0213aad281cfd3deee1a0c0ae4d3a22cdae97dd3a79e906ca386520f8242d08f",
    "recall": "01936ce51b3820aac957d5c4ca774610691daf96ccb2a1e4a2259f8e2cce14ad",
    "sorting": "6e6ee2a2b7ead9b1615d96336a497fde13b97830617ea780637355ed84bddd05",
    "state": "39b65b5f0edc2ff2cb87fed6d63511802a45ab02fc4362b5e91fe976ead3f888",
    "update": "49e5b0452f97d86b7bbedbd47361f91d4b92badc9210326ac1e838baeef05152",
    "variables": "fb91d4dec333cc6d46b574d3400307fc84f1d47060a7a9d8a60c9f912b04cb1f",
}
# Its first 16 digits for the other tasks, for two numbers and two lengths
KNOWN_TOO = {
    "babilong_qa1": "508b656960bf293d",
    "babilong_qa2": "240bf6e54b13f9d3",
    "babilong_qa3": "b7ac57250a92eceb",
    "babilong_qa4": "ccb9c0598986e6b8",
    "babilong_qa5": "a2f67c61fe1ad935",
    "chunk_hops": "5e583a5ef4c89b70",
    "chunk_recall": "86160ba860bffcbc",
    "mqar": "8dff3359fdf36af6",
    "multi_step_arithmetic": "b2f64efb954ac250",
    "parity": "f4ea65779d36028d",
    "poisoned_recall": "ad37cc1c15493698",
    "ruler_cwe": "ff7fa4a7c4f49c2c",
    "ruler_fwe": "6f36b1f77e6a94b0",
    "ruler_niah_multikey_1": "869fb3cb82ac1c24",
    "ruler_niah_multikey_2": "de91d6861054adaa",
    "ruler_niah_multikey_3": "da08006f3a06c6d2",
    "ruler_niah_multiquery": "fa72c0a816de07ea",
    "ruler_niah_multivalue": "6eb663f24a573060",
    "ruler_niah_single_1": "b13e3aaf980436de",
    "ruler_niah_single_2": "36bb5c32f658c375",
    "ruler_niah_single_3": "3cb9d2df80092459",
    "ruler_vt": "f1b51d8f661b1815",
    "s3": "9eec4fe3c6fb97ea",
    "s5": "d1679100d9c95706",
}


def test_every_task_has_a_solver() -> None:
    assert sorted(SOLVERS) == TASKS.names()


@pytest.mark.parametrize("task", TASKS.names())
@given(
    seed=st.integers(0, 2**63 - 1),
    number=st.integers(0, 10**9),
    characters=st.integers(1, 9000),
    filler=st.sampled_from([None, FILLER]),
)
def test_the_answer_follows_from_the_prompt(
    task: str, seed: int, number: int, characters: int, filler: Filler | None
) -> None:
    made = make_example(task, seed, number, characters, filler=filler)
    answer = made.answer.removeprefix("Answer:").strip()
    assert answer == SOLVERS[task](made.prompt)
    assert made.text == made.prompt + made.steps + made.answer
    assert made.answer.startswith("Answer: " if made.steps else " ")
    if made.steps:
        assert made.steps.startswith(THINK_BEGIN)
        assert made.steps.endswith(f"{THINK_END}\n")
    else:
        assert made.prompt.endswith("\nAnswer:")
    if characters > 1000:
        least, most = BOUNDS.get(task, (0.7, 1.4))
        assert least * characters < len(made.text) < most * characters or (task == "mqar" and characters > 4000)
    assert made == make_example(task, seed, number, characters, filler=filler)
    assert task.startswith("ruler") == bool(made.references)
    if made.references:
        assert answer == ", ".join(made.references)
    assert score(made, made.steps + made.answer) == 1


def digest_of(task: str, numbers: int, seeds: tuple[int, ...], lengths: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    for number in range(numbers):
        for seed in seeds:
            for characters in lengths:
                made = make_example(task, seed, number, characters)
                digest.update(repr((made.prompt, made.steps, made.answer)).encode() + b"\n")
    return digest.hexdigest()


@pytest.mark.parametrize("task", TASKS.names())
def test_known_exercises_stay_what_they_are(task: str) -> None:
    """Corpora made by another version of this or of Python must be the same."""
    if task in KNOWN:
        assert digest_of(task, 12, (0, 1, 2**40), (1, 60, 700, 4000, 20_000)) == KNOWN[task]
    else:
        assert digest_of(task, 2, (2**40,), (60, 4000))[:16] == KNOWN_TOO[task]


@given(number=st.integers(0, 10**9), facts=st.integers(3, 40))
def test_stories_of_all_that_people_do(number: int, facts: int) -> None:
    """Things that are given away are where their new holder is, in no task so far."""
    doings = [World.move, World.take, World.drop, World.give]
    for questions in (person_questions, thing_questions, before_questions):
        told = story(Rng(1, "test", number), facts, doings, questions)
        assert solve_story(f"{' '.join(told.sentences)}\nQuestion: {told.question.text}") == told.question.answer
        assert [note.passage for note in told.notes] == told.sentences
        assert answer_from(told.question.text, told.notes[-1].memory) == told.question.answer


def answer_from(question: str, memory: str) -> str:
    """The answer from the last note alone: `Agnes attic, Bruno hall, apple pantry Bruno`."""
    entries = {name: places for name, *places in (entry.split() for entry in memory.split(", "))}
    places = {name: entry[-1] for name, entry in entries.items()}
    subject = re.split(r"\W+", question.removeprefix("Where is ").removeprefix("Where was ").removeprefix("the "))[0]
    if "before" in question:
        return str(entries[subject][0])
    return places.get(places[subject], places[subject])  # of a thing that somebody holds the place of that person


def test_steps_are_true() -> None:
    for number in range(20):
        steps = make_example("arithmetic", 1, number, 2000).steps
        signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
        for one, sign, other, result in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)\.", steps):
            assert signs[sign](int(one), int(other)) == int(result)
        steps = make_example("multi_step_arithmetic", 1, number, 2000).steps
        for one, sign, other, result in re.findall(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)\.", steps):
            assert signs[sign](int(one), int(other)) == int(result)
            assert abs(int(result)) <= 9999
        made = make_example("hops", 1, number, 2000)
        assert set(re.findall(r"The guard of \w+ is \w+\.", made.steps)) <= set(
            re.findall(r"The guard of \w+ is \w+\.", made.prompt)
        )


def test_exercises_differ_and_answers_lie_everywhere() -> None:
    places = []
    for number in range(200):
        made = make_example("recall", 1, number, 3000)
        fact = f"{question_of(made.prompt, 'What is the code of ([A-Za-z]+)[?]')} is{made.answer}."
        places.append(made.prompt.index(fact) / len(made.prompt))
    assert len({make_example("recall", 1, number, 500).text for number in range(200)}) == 200
    # uniform over the text: mean 1/2, standard deviation 0.29 / sqrt(200); five of these are passed once in 10^6
    assert abs(sum(places) / 200 - 0.5) < 5 * 0.29 / 200**0.5
    assert min(places) < 0.1 < 0.9 < max(places)
    assert make_example("recall", 2, 0, 500) != make_example("recall", 1, 0, 500)


@pytest.mark.parametrize("task", TASKS.names())
@pytest.mark.parametrize("characters", [1000, 12_000])
def test_no_two_exercises_are_near_duplicates(task: str, characters: int) -> None:
    """Else a corpus would keep one of them: the Jaccard similarity of their five-word shingles, at most 0.8 there."""
    shingles = []
    for number in range(12):
        words = re.findall(r"\w+", make_example(task, 1, number, characters).text.lower())
        shingles.append({tuple(words[position : position + 5]) for position in range(len(words) - 4)})
    for one, other in combinations(shingles, 2):
        assert len(one & other) / len(one | other) < 0.2


def test_a_known_exercise_stays_what_it_is() -> None:
    """Corpora made by another version of this or of Python must be the same: the text of the first one."""
    words = "buda kile buna lebi kamu kiku"
    assert make_example("copying", 1, 0, 60).text == f"Words: {words}\nQuestion: What were the words?\nAnswer: {words}"


def test_documents_of_a_source() -> None:
    section = TasksSource(kind="tasks", tasks=["recall", "sorting"], documents=5, characters=300, seed=4)
    made = list(generate(section))
    assert [where for where, _, _ in made] == ["recall 0", "sorting 0", "recall 1", "sorting 1", "recall 2"]
    for where, text, meta in made:
        task, number = where.split()
        assert text == make_example(task, 4, int(number), 300).text
        assert meta["task"] == task
        assert text.startswith(meta["prompt"])
        assert text.endswith(meta["answer"])
    wrong = section.model_copy(update={"tasks": ["recal"]})
    with pytest.raises(ConfigError, match=r"there is no task 'recal'; there are arithmetic,.* did you mean 'recall'"):
        list(generate(wrong))
