"""The tasks qa1 to qa5 of BABILong: short stories hidden in long text, with our own simulator (arXiv 2406.10149).

BABILong hides the sentences of a bAbI story (Weston et al., arXiv 1502.05698: one, two and three supporting facts,
two-argument and three-argument relations) in their order among sentences of books. Here the caller gives the filler;
sentences with a person or thing of the story are skipped. As in BABILong there are six rooms, four people and three
things, so the chance level is the same; the words are different.

People move, take things, put them down and give them to others in the same room. The initial locations are not told.
The location of a person is known after the first move, and only known locations are asked for. Ambiguous questions are
not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from cdrmix.data.tasks.example import ANSWER, Example, Length, Note, task
from cdrmix.data.tasks.rng import Rng
from cdrmix.errors import ConfigError

PEOPLE = ("Agnes", "Bruno", "Clara", "Edgar")
ROOMS = ("kitchen", "cellar", "attic", "library", "pantry", "hall")
THINGS = ("apple", "lantern", "basket")
MOVE = ("went to", "walked to", "moved to", "hurried to")
TAKE = ("picked up", "took", "grabbed", "fetched")
DROP = ("put down", "dropped", "laid down", "set down")
GIVE = ("gave", "handed", "passed", "brought")
AXES = (("north", "south"), ("east", "west"))


@dataclass(frozen=True)
class Story(Length):
    """Harder with more facts, of which one to three are needed, and with longer text.

    question_first: the text begins with the question, so that a reader knows what to remember.
    """

    facts: int = 10
    question_first: bool = False


class Gift(NamedTuple):
    """Who gave what to whom."""

    giver: str
    thing: str
    receiver: str


class Known(NamedTuple):
    """What a reader of the sentences so far knows: the locations of people who have moved, who holds which thing, and
    the rooms in which each thing has been since it was first taken; None: an unknown room."""

    places: dict[str, str]
    holders: dict[str, str]
    trails: dict[str, tuple[str | None, ...]]

    def of_people(self, people: Sequence[str]) -> str:
        """Where people are: `Agnes attic, Bruno hall`."""
        return ", ".join(f"{person} {self.places[person]}" for person in people if person in self.places)

    def of_thing(self, thing: str, rooms: int) -> str:
        """Where all people are, who or which room has the thing, and with rooms=2 the room before: `Agnes attic,
        Bruno hall, apple pantry Agnes`. People who do not hold it count too: they may take it later."""
        trail = [room or "?" for room in self.trails[thing]]
        if not trail:
            return self.of_people(PEOPLE)
        before = ["-", *trail][-2:-1] if rooms == 2 else []
        of_thing = " ".join([thing, *before, self.holders.get(thing) or trail[-1]])
        return ", ".join([self.of_people(PEOPLE), of_thing]).removeprefix(", ")


class World:
    """The locations of people and things, and what a reader of the sentences so far knows."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.locations = {name: rng.choice(ROOMS) for name in (*PEOPLE, *THINGS)}
        self.holders: dict[str, str] = {}
        self.seen: set[str] = set()  # people who have moved, so that their locations are known
        self.trails: dict[str, list[tuple[str, bool]]] = {thing: [] for thing in THINGS}  # rooms since first taken
        self.gifts: list[Gift] = []

    def note(self, thing: str, known: bool) -> None:
        """Adds the room of a thing to its trail if it changed. known: whether a reader knows it."""
        trail, room = self.trails[thing], self.locations[thing]
        if trail and trail[-1][0] == room:
            trail[-1] = (room, known or trail[-1][1])
        else:
            trail.append((room, known))

    def move(self) -> str:
        """A person moves to another room with the things they hold."""
        person = self.rng.choice(PEOPLE)
        room = self.rng.choice([room for room in ROOMS if room != self.locations[person]])
        self.locations[person] = room
        self.seen.add(person)
        for thing, holder in self.holders.items():
            if holder == person:
                self.locations[thing] = room
                self.note(thing, known=True)
        return f"{person} {self.rng.choice(MOVE)} the {room}."

    def take(self) -> str | None:
        """A person takes a thing in the same room. None if nobody can."""
        free = [thing for thing in THINGS if thing not in self.holders]
        able = [
            (person, thing) for person in PEOPLE for thing in free if self.locations[person] == self.locations[thing]
        ]
        if not able:
            return None
        person, thing = self.rng.choice(able)
        self.holders[thing] = person
        self.note(thing, known=person in self.seen)
        return f"{person} {self.rng.choice(TAKE)} the {thing}."

    def drop(self) -> str | None:
        """A person puts down a thing. None if nobody holds one."""
        if not self.holders:
            return None
        thing = self.rng.choice(list(self.holders))
        return f"{self.holders.pop(thing)} {self.rng.choice(DROP)} the {thing}."

    def give(self) -> str | None:
        """A person gives a thing to another person in the same room. None if nobody can."""
        able = [
            Gift(giver, thing, person)
            for thing, giver in self.holders.items()
            for person in PEOPLE
            if person != giver and self.locations[person] == self.locations[giver]
        ]
        if not able:
            return None
        gift = self.rng.choice(able)
        self.holders[gift.thing] = gift.receiver
        self.note(gift.thing, known=gift.receiver in self.seen)
        self.gifts.append(gift)
        return f"{gift.giver} {self.rng.choice(GIVE)} the {gift.thing} to {gift.receiver}."

    def known(self) -> Known:
        """What a reader of the sentences so far knows."""
        places = {person: self.locations[person] for person in PEOPLE if person in self.seen}
        trails = {thing: tuple(room if known else None for room, known in self.trails[thing]) for thing in THINGS}
        return Known(places, dict(self.holders), trails)


class Question(NamedTuple):
    """A question and its answer. memory: from what a reader knows, what is needed to answer it at any later time."""

    text: str
    answer: str
    memory: Callable[[Known], str] | None = None


def person_questions(world: World) -> list[Question]:
    """Where somebody is."""
    return [
        Question(f"Where is {person}?", world.locations[person], partial(Known.of_people, people=[person]))
        for person in PEOPLE
        if person in world.seen
    ]


def thing_questions(world: World) -> list[Question]:
    """Where a thing is: who took it, and where they went."""
    return [
        Question(f"Where is the {thing}?", trail[-1][0], partial(Known.of_thing, thing=thing, rooms=1))
        for thing, trail in world.trails.items()
        if trail and trail[-1][1]
    ]


def before_questions(world: World) -> list[Question]:
    """Where a thing was before the room in which it now is, and was only once."""
    return [
        Question(
            f"Where was the {thing} before it was in the {trail[-1][0]}?",
            trail[-2][0],
            partial(Known.of_thing, thing=thing, rooms=2),
        )
        for thing, trail in world.trails.items()
        if len(trail) > 1 and trail[-1][1] and trail[-2][1] and [room for room, _ in trail].count(trail[-1][0]) == 1
    ]


def gift_questions(world: World) -> list[Question]:
    """Who gave, who got, what was given; each question fits one gift alone."""
    asked = [
        Question(*question)
        for gift in world.gifts
        for question in (
            (f"Who gave the {gift.thing} to {gift.receiver}?", gift.giver),
            (f"What did {gift.giver} give to {gift.receiver}?", gift.thing),
            (f"To whom did {gift.giver} give the {gift.thing}?", gift.receiver),
            (f"Who was given the {gift.thing}?", gift.receiver),
            (f"Who gave the {gift.thing} away?", gift.giver),
        )
    ]
    times = Counter(question.text for question in asked)
    return [question for question in asked if times[question.text] == 1]


class Told(NamedTuple):
    """A story: its sentences, what a reader knows after each of them, and a question."""

    sentences: list[str]
    known: list[Known]
    question: Question

    @property
    def notes(self) -> tuple[Note, ...]:
        """What to keep after each sentence; empty for a question without a memory."""
        if self.question.memory is None:
            return ()
        memories = map(self.question.memory, self.known)
        return tuple(Note(sentence, memory) for sentence, memory in zip(self.sentences, memories, strict=True))


def story(
    rng: Rng,
    facts: int,
    doings: Sequence[Callable[[World], str | None]],
    questions: Callable[[World], list[Question]],
) -> Told:
    """A story of `facts` sentences and a question. A story without a valid question is generated again.

    Each sentence is of one of `doings`, drawn evenly, or a move where that one cannot be.
    """
    while True:
        world, sentences, known = World(rng), [], []
        for _ in range(facts):
            sentences.append(rng.choice(doings)(world) or world.move())
            known.append(world.known())
        if possible := questions(world):
            return Told(sentences, known, rng.choice(possible))


def hidden(
    rng: Rng,
    difficulty: Story,
    facts: Sequence[str],
    question: Question,
    words: Sequence[str],
    notes: tuple[Note, ...] = (),
) -> Example:
    """The facts in their order among filler without the story's words, and the question."""
    asked = f"\nQuestion: {question.text}\n{ANSWER}"
    text = rng.among_filler(facts, difficulty.characters - len(asked), words)
    if difficulty.question_first:
        text = f"{question.text} {text}"
    return Example(text + asked, "", f" {question.answer}", notes=notes)


def simulated(
    rng: Rng,
    difficulty: Story,
    least: int,
    doings: Sequence[Callable[[World], str | None]],
    questions: Callable[[World], list[Question]],
) -> Example:
    """A hidden story; ConfigError for fewer facts than a question of the kind follows from."""
    if difficulty.facts < least:
        raise ConfigError(f"difficulty: facts = {difficulty.facts}; this task needs at least {least}")
    told = story(rng, difficulty.facts, doings, questions)
    return hidden(rng, difficulty, told.sentences, told.question, (*PEOPLE, *THINGS), told.notes)


@task("babilong_qa1", Story())
def one_fact(rng: Rng, difficulty: Story) -> Example:
    """Where is a person: one supporting fact, their last move."""
    return simulated(rng, difficulty, 1, [World.move], person_questions)


@task("babilong_qa2", Story(facts=16))
def two_facts(rng: Rng, difficulty: Story) -> Example:
    """Where is a thing: two supporting facts, who took it and where they went."""
    return simulated(rng, difficulty, 2, [World.move, World.take, World.drop], thing_questions)


@task("babilong_qa3", Story(facts=24))
def three_facts(rng: Rng, difficulty: Story) -> Example:
    """Where was a thing before: three supporting facts, who took it and where they went twice."""
    return simulated(rng, difficulty, 3, [World.move, World.take, World.drop], before_questions)


@task("babilong_qa4", Story(facts=2))
def two_arguments(rng: Rng, difficulty: Story) -> Example:
    """Rooms in a line: which room is on one side of another; the direction of the question matters."""
    if not 2 <= difficulty.facts < len(ROOMS):
        raise ConfigError(f"difficulty: facts = {difficulty.facts}; this task has 2 to {len(ROOMS) - 1}")
    line = rng.shuffled(ROOMS)[: difficulty.facts + 1]  # each on the side `ahead` of the next one
    ahead, behind = rng.shuffled(rng.choice(AXES))
    facts = []
    for first, second in pairwise(line):
        forwards = f"The {first} is {ahead} of the {second}."
        facts.append(rng.choice((forwards, f"The {second} is {behind} of the {first}.")))
    middle = 1 + rng.randrange(len(line) - 2)
    first, room, second = line[middle - 1 : middle + 2]
    question = rng.choice(
        (
            (f"Which room is {ahead} of the {room}?", first),
            (f"Which room is {behind} of the {room}?", second),
            (f"Which room is the {room} {ahead} of?", second),
            (f"Which room is the {room} {behind} of?", first),
        )
    )
    return hidden(rng, difficulty, rng.shuffled(facts), Question(*question), ROOMS)


@task("babilong_qa5", Story(facts=16))
def three_arguments(rng: Rng, difficulty: Story) -> Example:
    """Who gave what to whom: one supporting fact of three arguments."""
    return simulated(rng, difficulty, 2, [World.move, World.take, World.give], gift_questions)
