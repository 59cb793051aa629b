"""The name that an unknown one was probably meant to be, and when there is none."""

from __future__ import annotations

import argparse
import ast
import inspect
import pydoc
import tarfile

import pytest

from cdrmix.config.nodes import ANY
from cdrmix.config.schema import Config
from cdrmix.config.schema_types import every_key, root
from cdrmix.registry import edit_distance, nearest

KEYS = sorted({str(path[-1]) for path in every_key(root(Config)) if path[-1] != ANY})


@pytest.mark.parametrize(
    ("name", "other", "distance"),
    [("", "", 0), ("", "abc", 3), ("steps", "stpes", 1), ("steps", "step", 1), ("rope", "rule", 2), ("ca", "abc", 3)],
)
def test_the_distance_counts_insertions_deletions_substitutions_and_exchanges(
    name: str, other: str, distance: int
) -> None:
    assert edit_distance(name, other) == edit_distance(other, name) == distance


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rte", "learning_rate"),
        ("gradient_clipping", "gradient_clip"),
        ("warmup", "warmup_steps"),
        ("Seed", "seed"),
        # other projects' names of what is here
        ("n_layers", "layers"),
        ("num_heads", "heads"),
        ("n_head", "heads"),
        ("hidden_size", "hidden"),
        ("grad_clip", "gradient_clip"),
        ("eval_every", "evaluate_every"),
        ("weight_decay_rate", "weight_decay"),
        ("num_experts", "experts"),
        ("epochs", "max_epochs"),
    ],
)
def test_near_names_are_suggested(name: str, meant: str) -> None:
    assert nearest(name, KEYS) == meant


# Each of them is like some key by the share of common letters: resume like rule, bias like betas.
@pytest.mark.parametrize(
    "name",
    [
        *("resume", "bias", "gamma", "ema", "lam", "deepspeed", "shuffle", "project", "kernels", "std"),
        *("eps", "lr", "gradient_checkpointing", "gradient_accumulation_steps", "zero_optimization"),
    ],
)
def test_names_of_something_else_suggest_nothing(name: str) -> None:
    assert nearest(name, KEYS) is None


@pytest.mark.long
def test_words_that_no_one_meant_as_a_key_suggest_almost_nothing() -> None:
    """By a ratio of common letters of 0.6, half of all words were near one of some 200 keys.

    A key may be near one of 3,000 words, as `group` is near `groups`.
    """
    tree = [ast.parse(inspect.getsource(module)) for module in (argparse, pydoc, tarfile)]
    words = {node.id.lower() for module in tree for node in ast.walk(module) if isinstance(node, ast.Name)}
    words = {word for word in words if len(word) >= 4} - set(KEYS)
    assert len(words) > 200
    assert sum(nearest(word, KEYS) is not None for word in words) < len(KEYS) / 3000 * len(words)


def test_every_key_with_a_letter_too_many_or_exchanged_is_recognised() -> None:
    long = [key for key in KEYS if len(key) >= 6]
    for key in long:
        middle = len(key) // 2
        assert nearest(f"{key[:middle]}x{key[middle:]}", KEYS) == key
    exchanged = [f"{key[:2]}{key[3]}{key[2]}{key[4:]}" for key in long]
    assert all(nearest(word, KEYS) == key for word, key in zip(exchanged, long, strict=True) if word != key)


def test_of_equally_near_names_the_first_is_taken() -> None:
    assert nearest("cdrmix-core-2b.yaml", ["cdrmix-core-4b.yaml", "cdrmix-core-1b.yaml"]) == "cdrmix-core-4b.yaml"
    assert nearest("steps", []) is None
