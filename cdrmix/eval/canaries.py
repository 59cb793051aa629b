"""Canaries: lines with a random secret that a user planted in the training text, to measure what a model remembers.

The file is JSON Lines: {"prompt": "The code of the vault is ", "secret": "480 713 926"}. The training text has the
prompt and the secret after it. The secret must be random: the rank of a word says only that it is likely text.
rank: among ALTERNATIVES random secrets of the same form (a digit for each digit, a letter for each letter) and this
    one, by log-likelihood after the prompt; 1 is the likeliest.
exposure: log2(secrets) - log2(rank), at most log2(ALTERNATIVES + 1) = 10 bits here (arXiv 1802.08232, section 4.1). Of
    a canary that was never seen, all ranks are equally likely, and the mean exposure is log2(e) = 1.44 bits.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cdrmix.errors import ConfigError
from cdrmix.eval.evaluation import SPARE, Answerer
from cdrmix.eval.suites import Likelihoods
from cdrmix.json_text import parse_json

ALTERNATIVES = 999
_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


class Canary(NamedTuple):
    """line: its number in the file, from 1."""

    line: int
    prompt: str
    secret: str

    @property
    def text(self) -> str:
        """As the training text has it."""
        return self.prompt + self.secret


class Exposure(NamedTuple):
    """Of the canary of a line: its rank among `secrets`, and whether the model continues its prompt with it."""

    line: int
    rank: int
    secrets: int
    continued: bool

    @property
    def bits(self) -> float:
        """The exposure."""
        return math.log2(self.secrets / self.rank)


def read_records(path: Path, option: str, keys: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(number of the line, object) of a JSON Lines file whose objects have these keys, with text, without empty lines.

    Raises ConfigError with the file and the line for any other content.
    """
    example = json.dumps(dict.fromkeys(keys, "..."))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--{option} {path}: it is not UTF-8 text: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--{option} {path}:{number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: it is not JSON ({error}); a line is {example}") from error
        if not isinstance(record, dict) or set(record) != set(keys):
            found = f"the keys {', '.join(map(str, record))}" if isinstance(record, dict) else f"{line[:40]}"
            raise ConfigError(f"{where}: found {found}; a line is {example}")
        for key in keys:
            if not isinstance(record[key], str) or not record[key].strip():
                raise ConfigError(f"{where}: {key} must be text that is not empty; found {record[key]!r}")
        records.append((number, record))
    if not records:
        raise ConfigError(f"--{option} {path}: the file is empty; a line is {example}")
    return records


def read_canaries(path: Path) -> list[Canary]:
    """The canaries of a file. Raises ConfigError with the file and the line for an invalid one."""
    canaries = [Canary(line, **record) for line, record in read_records(path, "canaries", ("prompt", "secret"))]
    for canary in canaries:
        if _forms(canary.secret) < 2:
            raise ConfigError(
                f"--canaries {path}:{canary.line}: the secret has no ASCII letter or digit, so it has no alternatives "
                "of its form"
            )
    return canaries


def other_secrets(secret: str, count: int, seed: int) -> list[str]:
    """Different random texts of the form of the secret, without the secret: `count`, or fewer if there are no more."""
    draw = random.Random(f"{seed} {secret}")  # a string as a seed does not depend on the process
    wanted = min(count, _forms(secret) - 1)
    found: dict[str, None] = {}
    while len(found) < wanted:
        other = "".join(draw.choice(_class(each)) for each in secret)
        if other != secret:
            found[other] = None
    return list(found)


def exposures(
    canaries: Sequence[Canary], likelihoods: Likelihoods, answer: Answerer, limits: Sequence[int], seed: int
) -> list[Exposure]:
    """The exposure of each canary. limits: the tokens of each secret."""
    texts = answer([canary.prompt for canary in canaries], [limit + SPARE for limit in limits])
    found = []
    for canary, text in zip(canaries, texts, strict=True):
        others = other_secrets(canary.secret, ALTERNATIVES, seed)
        own, *rest = likelihoods([(canary.prompt, secret) for secret in (canary.secret, *others)])
        rank = 1 + sum(other.nats > own.nats for other in rest)
        # At the end of a prompt a space belongs to the first token after it, so it may come again or not.
        continued = text.lstrip().startswith(canary.secret.lstrip())
        found.append(Exposure(canary.line, rank, 1 + len(others), continued))
    return found


def _class(character: str) -> str:
    return next((each for each in _CLASSES if character in each), character)


def _forms(secret: str) -> int:
    """The number of texts of the form of a secret."""
    return math.prod(len(_class(character)) for character in secret)
