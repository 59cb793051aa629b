"""Good inputs of commands, each damaged as a seed decides: rows, configurations, run folders, exports, environments.

A case is the arguments of one command or several, the folder that they must leave as it was, and, where rows are given
in two containers, the folders of both preparations, which must be equal.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import yaml
from containers import CONTAINERS

ODD_TEXTS = (
    *("", " ", "\n", "\x00", "\ud800", "\ufeff", "a" * 3000, "\u202e", "é", "日本語", "<|endoftext|>", "{{ 1 }}"),
    *("\\u0000", "null", "NaN", "1e999", "../../etc", "~", "/", "-1", "0x10", "yes", "*x", "&x"),
    *("!!python/object:os.system", "a\tb"),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 2**200, -(2**63), 0.5, 1e308, float("nan"), float("inf"), [], {}, [None], [[]]),
    *({"": None}, {"a": {"b": [1]}}, [{"role": "user"}], "text"),
)
ENCODINGS = ("utf-16", "latin-1", "utf-8-sig", "utf-32")


class Rows(NamedTuple):
    """Rows of a kind of source that is prepared without complaint."""

    kind: str
    source: dict[str, Any]  # further keys of data.source
    rows: list[dict[str, Any]]
    containers: tuple[str, ...]


JSON_LINES_AND_PARQUET = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
TEXTS = Rows(
    "jsonl",
    {},
    [{"text": f"def f{n}(x):\n    return x + {n}\n", "url": f"http://h.org/{n}", "n": n} for n in range(8)],
    (*JSON_LINES_AND_PARQUET, "csv"),
)
CHATS = Rows(
    "chat",
    {"template": "chatml"},
    [
        {
            "messages": [
                {"role": "system", "content": "Answer."},
                {"role": "user", "content": f"What is {n} and {n}?"},
                {"role": "assistant", "content": f"It is {2 * n}."},
            ],
            "source": f"s{n % 2}",
        }
        for n in range(8)
    ],
    JSON_LINES_AND_PARQUET,
)
CALLS = Rows(
    "chat",
    {"template": "chatml"},
    [
        {
            "conversations": [
                {"from": "human", "value": f"Add {n} and 1."},
                {"from": "gpt", "value": f"{n + 1}", "weight": n % 2},
            ],
            "tools": [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
        }
        for n in range(8)
    ],
    JSON_LINES_AND_PARQUET,
)
PREFERENCES = Rows(
    "preferences",
    {"template": "chatml"},
    [{"prompt": f"What is {n} and 1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {n}."} for n in range(8)],
    JSON_LINES_AND_PARQUET,
)
ALL_ROWS = (TEXTS, CHATS, CALLS, PREFERENCES)


@dataclass
class Case:
    """One input: what is run on it, and what must hold afterwards.

    commands: the arguments of each. kept: a folder that must be as before. environment: variables during the commands.
    equal: folders of two preparations that have the same shards if both are made. what: the input, for a finding.
    """

    what: str
    commands: list[list[str]]
    kept: Path
    environment: dict[str, str] = field(default_factory=dict)
    equal: tuple[Path, Path] | None = None


class Good(NamedTuple):
    """What is damaged: a finished run with an export, a configuration, and overrides that make it small."""

    run: Path
    config: Path
    overrides: list[str]


Make = Callable[[random.Random, Path, Good], Case]


def odd(rng: random.Random) -> Any:
    """A value that few expect."""
    return rng.choice(ODD_TEXTS) if rng.random() < 0.5 else rng.choice(ODD)


def places_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each node of nested lists and dicts, but the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, each in inner:
        found += [(*place, key), *places_of(each, (*place, key))]
    return found


def mutated(rng: random.Random, value: Any) -> Any:
    """A copy with one to three nodes replaced, removed, renamed, repeated or nested."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = places_of(value)
        if not places:
            return value
        *way, last = rng.choice(places)
        parent = value
        for key in way:
            parent = parent[key]
        action = rng.randrange(6)
        if action == 0:
            parent[last] = odd(rng)
        elif action == 1:
            del parent[last]
        elif action == 2 and isinstance(parent, dict):
            parent[rng.choice(ODD_TEXTS) if rng.random() < 0.5 else f"{last}s"] = parent.pop(last)
        elif action == 3 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), parent[last])
        elif action == 4:
            parent[last] = rng.choice(([parent[last]], {"text": parent[last]}, {str(last): parent[last]}))
        else:
            parent[last] = str(parent[last]) + rng.choice(ODD_TEXTS)
    return value


def damaged(rng: random.Random, content: bytes) -> bytes:
    """A copy with bytes cut off, changed, repeated, or in another encoding."""
    action = rng.randrange(7)
    place = rng.randrange(len(content) + 1)
    if action == 0:
        return content[:place]
    if action == 1:
        return content[:place] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 300)))) + content[place:]
    if action == 2:
        changed = bytearray(content or b"x")
        for _ in range(rng.choice((1, 3, 20))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if action == 3:
        return content[place:] + content[:place]
    if action == 4:
        return content.decode("utf-8", "replace").encode(rng.choice(ENCODINGS), "replace")
    if action == 5:
        return content.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"", b"\x00")))
    return content + content[place:]


def written(rows: list[Any], container: str) -> bytes | None:
    """The rows in a container; None where it cannot have them."""
    if not container.startswith("jsonl") and (not all(isinstance(row, dict) for row in rows) or not any(rows)):
        return None
    if container == "csv" and not all(isinstance(value, str | int) for row in rows for value in row.values()):
        return None
    try:
        return CONTAINERS[container](rows)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError, AttributeError, ValueError):
        return None  # columns of Parquet have one type each


def prepare(good: Good, rows: Rows, container: str, folder: Path, content: bytes, **source: Any) -> list[str]:
    """Writes the file; the arguments that prepare it into folder/cache-CONTAINER."""
    kind = container if container in ("parquet", "csv") and rows.kind == "jsonl" else rows.kind
    path = folder / "in" / f"rows.{container}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    keys = {"kind": kind, "paths": [str(path)]} | rows.source | source
    arguments = [f"data.source.{key}={json.dumps(value)}" for key, value in keys.items()]
    return [
        *("data", "prepare", "--config", str(good.config), *good.overrides, *arguments),
        *(f"data.cache={folder / f'cache-{container}'}", f"run.root={folder / 'runs'}"),
    ]


HTML = """<html><head><meta charset="{charset}"><title>A page</title></head>
<body><main><p>{text}</p></main></body></html>"""


def of_documents(rng: random.Random, folder: Path, good: Good) -> Case:
    """Files that are a document each, one or all of them with damaged bytes, in folders and under odd names."""
    kind = rng.choice(("text", "html"))
    source = folder / "in"
    for number in range(6):
        text = f"The number {number} has a text of its own, of {number * 7} letters and more."
        if kind == "html":
            text = HTML.format(charset=rng.choice(("utf-8", "latin-1", "x")), text=text)
        content = text.encode()
        name = f"{number}.{'html' if kind == 'html' else 'txt'}"
        path = source / rng.choice(("", "a", "a/b", "ü", "a b")) / (rng.choice(("x ", "", "-", "ü")) + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damaged(rng, content) if rng.random() < 0.3 else content)
    keys = {"kind": kind, "paths": [str(source)]}
    arguments = [f"data.source.{key}={json.dumps(value)}" for key, value in keys.items()]
    command = ["data", "prepare", "--config", str(good.config), *good.overrides, *arguments]
    return Case(f"{kind}", [[*command, f"data.cache={folder / 'cache'}", f"run.root={folder / 'runs'}"]], source)


def of_rows(rng: random.Random, folder: Path, good: Good) -> Case:
    """Rows with odd values in them, in one container and in another."""
    rows = rng.choice(ALL_ROWS)
    changed: list[Any] = list(rows.rows)
    for _ in range(rng.choice((1, 2, 8))):
        number = rng.randrange(len(changed))
        changed[number] = mutated(rng, changed[number]) if rng.random() < 0.95 else odd(rng)
    rng.shuffle(changed)
    first, second = rng.sample(rows.containers, 2)
    made = [(container, written(changed, container)) for container in (first, second)]
    commands = [prepare(good, rows, name, folder, content) for name, content in made if content is not None]
    # A CSV file has text alone, and its empty field is no null.
    equal = len(commands) == 2 and "csv" not in (first, second)
    caches = (folder / f"cache-{first}", folder / f"cache-{second}")
    return Case(f"{rows.kind} {first} {second} {changed!r}", commands, folder / "in", equal=caches if equal else None)


def of_files(rng: random.Random, folder: Path, good: Good) -> Case:
    """A file of rows with damaged bytes."""
    rows = rng.choice(ALL_ROWS)
    container = rng.choice(rows.containers)
    content = written(rows.rows, container)
    assert content is not None
    content = damaged(rng, content)
    command = prepare(good, rows, container, folder, content)
    return Case(f"{container} {content[:4000]!r}", [command], folder / "in")


def of_configurations(rng: random.Random, folder: Path, good: Good) -> Case:
    """A configuration with odd values or damaged text."""
    text = good.config.read_text(encoding="utf-8")
    if rng.random() < 0.7:
        content = yaml.safe_dump(mutated(rng, yaml.safe_load(text)), allow_unicode=rng.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
    else:
        content = damaged(rng, text.encode())
    path = folder / "in" / "config.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    command = rng.choice(("validate", "params"))
    return Case(f"{command} {content!r}", [[command, "--config", str(path)]], path.parent)


def of_runs(rng: random.Random, folder: Path, good: Good) -> Case:
    """A file of a run, its checkpoints or its export that is damaged, gone, or a folder."""
    run = folder / "run"
    shutil.copytree(good.run, run, copy_function=os.link, symlinks=True)
    path = rng.choice(sorted(each for each in run.rglob("*") if each.suffix != ".png"))
    action = rng.randrange(5)
    name = path.relative_to(run)
    if path.is_dir():
        path.rename(path.with_name(path.name + "-away"))
        if action == 0:
            path.write_text("a file")
    else:
        content = path.read_bytes()
        path.unlink()  # before it is written, because it is a link to the good run's file
        if action == 0:
            path.mkdir()
        elif action == 1 and path.suffix == ".json":
            path.write_text(json.dumps(mutated(rng, json.loads(content))))
        elif action != 2:
            path.write_bytes(damaged(rng, content))
    commands = [
        ["checkpoints", "list", str(run)],
        ["checkpoints", "verify", str(run)],
        ["compare", str(run), str(good.run)],
        ["evidence", "verify", str(run / "export")],
        ["generate", "--model", str(run), "--prompt", "def", "--max-new-tokens", "1", "--device", "cpu"],
        ["generate", "--model", str(run / "export"), "--prompt", "def", "--max-new-tokens", "1", "--device", "cpu"],
    ]
    return Case(f"{name} action {action}", rng.sample(commands, 2), run)


def of_environments(rng: random.Random, folder: Path, good: Good) -> Case:
    """Variables that a launcher, a shell or another program has left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "CDRMIX_BACKEND", "XDG_CACHE_HOME")
    names += ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "COLUMNS", "NO_COLOR", "TZ", "LANG", "TMPDIR")
    chosen = {
        name: rng.choice(("", "0", "1", "-1", "abc", "65536", "1.5", "²", "reference")) for name in rng.sample(names, 2)
    }
    kept = folder / "in"
    kept.mkdir()
    generate = ["generate", "--model", str(good.run), "--prompt", "def", "--max-new-tokens", "1", "--device", "cpu"]
    validate = ["validate", "--config", str(good.config)]
    return Case(f"{chosen}", [rng.choice((generate, validate))], kept, environment=chosen)


# Of a hundred cases in turn: commands that take a tenth of a second are rarer than those that take a hundredth.
KINDS: tuple[Make, ...] = (of_rows, of_files, of_documents, of_runs, of_environments, *[of_configurations] * 5)


def make(seed: int, folder: Path, good: Good) -> Case:
    """Case number `seed`, with its input in the empty folder."""
    return KINDS[seed % len(KINDS)](random.Random(seed), folder, good)
