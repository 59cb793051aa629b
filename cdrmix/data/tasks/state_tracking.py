"""State tracking over a text: chains of variables, chains of relations, things in boxes."""

from __future__ import annotations

from itertools import pairwise

from cdrmix.data.tasks.example import ANSWER, THINK_BEGIN, THINK_END, Example, Length, task
from cdrmix.data.tasks.rng import Rng

HOPS = 4  # of a chain of variables, as in RULER
BOXES = 5  # S5, the smallest group whose tracking needs more than fixed depth (Barrington 1989)
THINGS = ["a key", "a coin", "a ring", "a shell", "a map", "a stone", "a bell", "a feather"]


@task("variables", Length())
def variables(rng: Rng, difficulty: Length) -> Example:
    """Chains of assignments among filler. Asked: all variables with a given value, in order."""
    chains = max(2, difficulty.characters // 1500)
    names = rng.names(chains * (HOPS + 1))
    first = 10_000 + rng.randrange(80_000)
    values = rng.shuffled(range(first, first + chains))  # consecutive numbers, which differ only in the last digits
    lines = [
        [f"Let {chain[0]} = {value}."] + [f"Let {name} = {before}." for before, name in pairwise(chain)]
        for chain, value in zip((names[start::chains] for start in range(chains)), values, strict=True)
    ]
    order = rng.shuffled([chain for chain in range(chains) for _ in range(HOPS + 1)])
    waiting = [iter(chain) for chain in lines]
    facts = [next(waiting[chain]) for chain in order]
    asked = rng.randrange(chains)
    question = f"\nQuestion: Which variables have the value {values[asked]}?\n{ANSWER}"
    text = rng.among_filler(facts, difficulty.characters - len(question))
    return Example(text + question, "", f" {', '.join(names[asked::chains])}")


@task("hops", Length())
def hops(rng: Rng, difficulty: Length) -> Example:
    """A relation (guard of) in random order among filler. Asked: the relation applied two to four times."""
    names = rng.names(max(6, difficulty.characters // 200))
    facts = [f"The guard of {name} is {guard}." for name, guard in zip(names, names[1:] + names[:1], strict=True)]
    count = 2 + rng.randrange(3)
    start = rng.randrange(len(names))
    chain = [names[(start + step) % len(names)] for step in range(count + 1)]
    question = f"\nQuestion: Who is {'the guard of ' * count}{chain[0]}?\n"
    steps = " ".join(f"The guard of {name} is {guard}." for name, guard in pairwise(chain))
    text = rng.among_filler(rng.shuffled(facts), difficulty.characters - len(question) - len(steps) - 30)
    return Example(text + question, f"{THINK_BEGIN}{steps}{THINK_END}\n", f"{ANSWER} {chain[-1]}")


@task("state", Length())
def state(rng: Rng, difficulty: Length) -> Example:
    """Things in boxes whose contents are swapped repeatedly. Asked: the contents of a box at the end."""
    # names of its own in every example: with numbers all of them would be near-duplicates, of ten different swaps
    boxes, things = rng.names(BOXES), rng.shuffled(THINGS)[:BOXES]
    facts = [f"Box {box} holds {thing}." for box, thing in zip(boxes, things, strict=True)]
    for _ in range(max(2, (difficulty.characters - 180) // 27)):
        first, second = rng.shuffled(range(BOXES))[:2]
        things[first], things[second] = things[second], things[first]
        facts.append(f"Swap {boxes[first]} and {boxes[second]}.")
    asked = rng.randrange(BOXES)
    question = f"Question: What does box {boxes[asked]} hold?\n{ANSWER}"
    return Example(f"{' '.join(facts)}\n{question}", "", f" {things[asked]}")
