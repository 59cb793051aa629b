"""Token examples: MQAR as zoology defines it, word problems of groups, and both compared with their texts."""

from __future__ import annotations

from collections import Counter
from itertools import product as pairs_of

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.tasks import IGNORED, TASKS, make_example, make_token_example, score_tokens
from cdrmix.data.tasks.groups import elements_of, product
from cdrmix.data.tasks.mqar import PUBLISHED_SIZES, Mqar, word_of
from cdrmix.errors import ConfigError

TOKENS = [task for task in TASKS.names() if TASKS[task].tokens]


@st.composite
def mqar_difficulties(draw: st.DrawFn) -> Mqar:
    """Any that can be, the tightest too."""
    pairs = draw(st.integers(1, 64))
    return Mqar(
        tokens=2 * draw(st.integers(2 * pairs, 2 * pairs + 100)),
        pairs=pairs,
        vocabulary=draw(st.sampled_from([2 * pairs + 2, 2 * pairs + 3, 8192])),
        power_a=draw(st.sampled_from([0.01, 0.5, 1.0])),
        noise=draw(st.booleans()),
    )


@given(number=st.integers(0, 10**9), difficulty=mqar_difficulties())
def test_mqar_asks_every_key_once_more(number: int, difficulty: Mqar) -> None:
    made = make_token_example("mqar", 1, number, difficulty)
    context, half = 2 * difficulty.pairs, difficulty.vocabulary // 2
    assert len(made.inputs) == len(made.targets) == difficulty.tokens
    value_of = dict(zip(made.inputs[:context:2], made.inputs[1:context:2], strict=True))
    assert len(value_of) == len(set(value_of.values())) == difficulty.pairs
    assert all(1 <= key < half <= value < difficulty.vocabulary for key, value in value_of.items())
    asked = {position: target for position, target in enumerate(made.targets) if target != IGNORED}
    assert all(position >= context and position % 2 == 0 for position in asked)
    assert {made.inputs[position]: target for position, target in asked.items()} == value_of
    rest = [made.inputs[position] for position in range(context, difficulty.tokens) if position not in asked]
    if difficulty.noise:
        assert not {0, *value_of} & set(rest)
        assert all(0 <= token < difficulty.vocabulary for token in rest)
    else:
        assert not any(rest)


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_gaps_of_mqar_follow_the_power_law(power_a: float) -> None:
    """The first key's slot has the law itself; the second's is drawn from what the first has left."""
    difficulty = Mqar(tokens=40, pairs=4, power_a=power_a)
    slots, rng = 16, 12_000
    weights = [gap ** (power_a - 1) for gap in range(1, slots + 1)]
    law = [weight / sum(weights) for weight in weights]
    second = [
        sum(law[other] * law[slot] / (1 - law[other]) for other in range(slots) if other != slot)
        for slot in range(slots)
    ]
    counts: list[Counter[int]] = [Counter(), Counter()]
    for number in range(rng):
        made = make_token_example("mqar", 5, number, difficulty)
        for count, key in zip(counts, made.inputs[:4:2], strict=True):
            count[(made.inputs.index(key, 8) - 8) // 2] += 1
    for count, expected in zip(counts, (law, second), strict=True):
        # chi-square of 15 degrees of freedom: mean 15; above 54 once in 4 * 10^5 tests
        chi_square = sum((count[slot] - rng * chance) ** 2 / (rng * chance) for slot, chance in enumerate(expected))
        assert chi_square < 54


def test_published_settings_of_mqar() -> None:
    assert PUBLISHED_SIZES == [(64, 4), (128, 8), (256, 16), (512, 64)]
    standard = TASKS["mqar"].standard
    assert (standard.tokens, standard.pairs, standard.vocabulary, standard.power_a) == (64, 4, 8192, 0.01)
    for characters, rung in ((1, 0), (447, 0), (896, 1), (2000, 2), (3584, 3), (10**6, 3)):
        level = standard.at_length(characters)
        assert (level.tokens, level.pairs) == PUBLISHED_SIZES[rung]
        text = make_example("mqar", 1, 0, characters)
        assert len(text.prompt.split("\n")[0]) <= len("Pairs: ") + 7 * level.tokens
    for changes, message in (
        ({"tokens": 63}, "must be even"),
        ({"pairs": 17}, "at least 4 a pair"),
        ({"vocabulary": 8}, "more than 9 "),
        ({"vocabulary": 10**6}, "at most 42,875"),
    ):
        with pytest.raises(ConfigError, match=message):
            standard.changed(changes)


def test_words_of_mqar_are_its_ids() -> None:
    """The text says what the ids say, and after each key that comes again its value."""
    assert len({word_of(token) for token in range(8192)}) == 8192
    id_of = {word_of(token): token for token in range(8192)}
    for number in range(20):
        difficulty = Mqar(tokens=128, pairs=8, noise=number % 2 == 1)
        made, text = make_token_example("mqar", 3, number, difficulty), make_example("mqar", 3, number, difficulty)
        ids = [id_of[word] for word in text.prompt.split("\n")[0].removeprefix("Pairs: ").split()]
        for position, token in enumerate(ids):
            told_before = made.targets[position - 1]
            assert token == (made.inputs[position] if told_before == IGNORED else told_before)
        assert made.targets[len(ids) - 1] == id_of[text.answer.strip()]
        assert set(made.targets[len(ids) :]) <= {IGNORED}


@pytest.mark.parametrize(("task", "order"), [("parity", 2), ("s3", 6), ("s5", 120)])
@given(number=st.integers(0, 10**9), elements=st.integers(1, 300))
def test_targets_of_word_problems_are_prefix_products(task: str, order: int, number: int, elements: int) -> None:
    difficulty = TASKS[task].standard.changed({"elements": elements})
    made = make_token_example(task, 1, number, difficulty)
    assert len(made.inputs) == len(made.targets) == elements
    assert made.vocabulary == order
    permutations = elements_of(difficulty.size)
    assert len(permutations) == order
    row = list(range(difficulty.size))
    for token, target in zip(made.inputs, made.targets, strict=True):
        row = [row[position] for position in permutations[token]]
        assert permutations[target] == tuple(row)
    text = make_example(task, 1, number, difficulty)
    line = text.prompt.split("\n")[-3].partition(": ")[2]
    assert len(line.split()) == elements
    if task == "parity":
        assert made.targets == [sum(made.inputs[: position + 1]) % 2 for position in range(elements)]
        assert text.answer == [" even", " odd"][made.targets[-1]]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_elements_are_a_group(size: int) -> None:
    elements = elements_of(size)
    assert elements[0] == tuple(range(size))
    for one, other in pairs_of(elements[:30], elements[-30:]):
        assert product(one, other) in elements
        assert product(product(one, other), elements[1]) == product(one, product(other, elements[1]))
    assert size == 2 or any(product(a, b) != product(b, a) for a, b in pairs_of(elements, elements))


def test_words_are_uniform() -> None:
    """Every element and every product equally often."""
    inputs: Counter[int] = Counter()
    targets: Counter[int] = Counter()
    for number in range(50):
        made = make_token_example("s5", 2, number, TASKS["s5"].standard.changed({"elements": 480}))
        inputs.update(made.inputs)
        targets.update(made.targets)
    for counts in (inputs, targets):  # 24,000 of 120: 119 degrees of freedom, standard deviation 15.4
        assert sum((counts[element] - 200) ** 2 / 200 for element in range(120)) < 119 + 6 * 15.4


@pytest.mark.parametrize("task", TOKENS)
def test_token_exercises_are_reproducible_and_scored(task: str) -> None:
    made = make_token_example(task, 1, 7)
    assert made == make_token_example(task, 1, 7)
    assert made != make_token_example(task, 1, 8)
    assert score_tokens(made, made.targets) == 1
    assert score_tokens(made, [-1] * len(made.targets)) == 0
    asked = [position for position, target in enumerate(made.targets) if target != IGNORED]
    one_wrong = [-1 if position == asked[0] else target for position, target in enumerate(made.targets)]
    assert score_tokens(made, one_wrong) == 1 - 1 / len(asked)
    with pytest.raises(ValueError, match="give one for each"):
        score_tokens(made, [])


def test_tasks_of_text_alone_have_no_token_ids() -> None:
    with pytest.raises(ConfigError, match="'recall' has no token ids; mqar, parity, s3, s5 have"):
        make_token_example("recall", 1, 0)
