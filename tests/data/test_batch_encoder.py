"""fastokens gives the ids of the tokenizers package, and is used only for tokenizers for which that is compared."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from cdrmix.config.schema import Config
from cdrmix.data.batch_encoder import PATTERNS, FastEncoder, ReferenceEncoder, hostile_sample, make_encoder, unsupported
from cdrmix.data.prepare import prepare
from cdrmix.data.tokenizer import FEW_CHARACTERS, TextTokenizer

END = "<|endoftext|>"
OTHER_LANGUAGES = (
    "Füße naïve Ærøskøbing Привет, мир! 東京都に行く 안녕하세요 नमस्ते दुनिया สวัสดี שלום مرحبا "
    "🙂👩\u200d👧 e\u0301 \u00bd \u00b2 \u2167 \U0001d7d8 "
)
CODE = [Path(module.__file__).read_text() for module in (json, subprocess, hashlib) if module.__file__]
KINDS = ("trained", "gpt2", *(f"{name} pattern" for name in PATTERNS if name != "cdrmix"))


@functools.cache
def tokenizer_of(kind: str) -> bytes:
    """tokenizer.json: trained by the project, with ByteLevel alone, or one of PATTERNS (llama3: with whole words)."""
    texts = [*CODE, OTHER_LANGUAGES * 20]
    if kind == "trained":
        return TextTokenizer.train(texts, vocab_size=1500, end_of_text=END).json_bytes
    name = kind.split()[0]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind != "gpt2":
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[END, "<|other|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    if name == "llama3":  # a word that no merges make
        content["model"]["vocab"]["Ġzqzqz"] = len(content["model"]["vocab"])
    return json.dumps(content).encode()


@functools.cache
def reference_of(json_bytes: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(json_bytes)
    tokenizer.encode_special_tokens = True
    return tokenizer


@functools.cache
def fast_of(kind: str) -> FastEncoder:
    encoder = make_encoder(reference_of(tokenizer_of(kind)), tokenizer_of(kind))
    assert isinstance(encoder, FastEncoder), encoder.description
    return encoder


def check(kind: str, texts: Sequence[str]) -> None:
    """Compares the ids of both packages."""
    expected = reference_of(tokenizer_of(kind)).encode_batch_fast(texts, add_special_tokens=False)
    found = fast_of(kind).encode(texts)
    assert len(found) == len(texts)
    for text, ids, reference in zip(texts, found, expected, strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == reference.ids, ascii(text[:200])


every_kind = pytest.mark.parametrize("kind", KINDS)


# Parts that patterns treat in different ways, and repetitions of them.
PARTS = [part for part in hostile_sample([END, "<|other|>"])[1:] if len(part) < 20]
fragments = st.tuples(st.sampled_from([*PARTS, *OTHER_LANGUAGES.split(" "), "return", " zqzqz"]), st.integers(1, 40))
mixtures = st.lists(st.one_of(st.sampled_from(PARTS), fragments.map(lambda pair: pair[0] * pair[1]))).map("".join)
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@every_kind
@settings(max_examples=examples(8))
@given(st.lists(st.one_of(any_text, mixtures), min_size=1, max_size=20))
def test_any_text(kind: str, texts: list[str]) -> None:
    check(kind, [*texts, "".join(texts)])


def around(codes: range, neighbours: Sequence[str]) -> str:
    """A text with each character between each of the neighbours."""
    return "".join(f"{before}{chr(code)}{before}" for code in codes for before in neighbours)


@pytest.mark.long
@every_kind
def test_every_character_with_neighbours(kind: str) -> None:
    """All code points but surrogates, next to a letter; those below 0x20000 and of plane 14 also next to one another, a
    digit, a space, a line end and an apostrophe. In the other planes all letters are ideographs."""
    step = 0x400
    for start in range(0, 0x110000, 8 * step):
        blocks = [range(first, first + step) for first in range(start, start + 8 * step, step)]
        blocks = [block for block in blocks if not 0xD800 <= block[0] < 0xE000]
        varied = start < 0x20000 or 0xE0000 <= start < 0xF0000
        check(kind, [around(block, ["", "a", "1", " ", "\n", "'"] if varied else ["a"]) for block in blocks])


def test_every_assigned_block_of_characters() -> None:
    """Of the project's own pattern, as in the long test: the planes with letters, digits, marks and emoji."""
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    check("trained", [around(range(code, code + 0x200), ["a", "1 "]) for code in codes[::0x200]])


UNITS = ("x", " ", "\n", " \n", "1", "é", "東", "\u0301", ".", "!\n", "'s", "ab c", "🙂", "\0")


@every_kind
def test_long_runs(kind: str) -> None:
    """Words, white space and punctuation; in one case 1e5 characters, which the package divides over its threads."""
    characters = 100_000 if kind == "trained" else 20_000
    runs = [unit * (characters // len(unit)) for unit in UNITS]
    check(kind, [*runs, *(f"a {run[: characters // 2]}b" for run in runs)])


@every_kind
def test_no_texts_and_empty_texts(kind: str) -> None:
    assert fast_of(kind).encode([]) == []
    check(kind, ["", "", "a", ""])


@every_kind
def test_a_lone_surrogate_is_refused_by_both(kind: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        fast_of(kind).encode(["a\ud800"])


@every_kind
def test_batches_of_the_tokenizer_use_it(kind: str) -> None:
    tokenizer = TextTokenizer(tokenizer_of(kind), END)
    assert len(CODE[1]) > FEW_CHARACTERS
    texts = [*CODE, "", f"{END} <|other|>"]
    ids = tokenizer.encode_batch(texts)
    assert tokenizer.encoder.description.startswith("fastokens ")
    expected = reference_of(tokenizer.json_bytes).encode_batch_fast(texts, add_special_tokens=False)
    assert [each.tolist() for each in ids] == [each.ids for each in expected]


def test_the_number_of_threads_changes_nothing() -> None:
    code = (
        "import sys, hashlib; from pathlib import Path; from cdrmix.data.tokenizer import TextTokenizer;"
        f"tokenizer = TextTokenizer(sys.stdin.buffer.read(), {END!r});"
        "text = Path(hashlib.__file__).with_name('subprocess.py').read_text();"
        "texts = [text * 4, '\\n \\n' * 50_000, *text.split('def ')];"
        "assert tokenizer.encoder.description.startswith('fastokens');"
        "print(hashlib.sha256(b''.join(ids.tobytes() for ids in tokenizer.encode_batch(texts))).hexdigest())"
    )
    found = set()
    for threads in ("1", "2", "5"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "FASTOKENS_BPE_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=tokenizer_of("trained"),
            env=environment,
            capture_output=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_a_forked_process_uses_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the threads of its parent, so that fastokens would wait for ever."""
    encoder = fast_of("trained")
    texts = [CODE[0]] * 20
    expected = [ids.tolist() for ids in encoder.encode(texts)]
    child = os.fork()
    if child == 0:
        same = [ids.tolist() for ids in encoder.encode(texts)] == expected
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_text_that_it_gives_up_on_is_encoded_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastokens

    content = json.loads(tokenizer_of("trained"))
    reference = reference_of(tokenizer_of("trained"))
    real = fastokens.Tokenizer.from_json_str

    class Limited:
        from_json_str = staticmethod(lambda text: real(text, pcre2_match_limit=1))

    with pytest.raises(ValueError, match="match limit"):
        Limited.from_json_str(json.dumps(content)).encode_batch_flat([CODE[0]])
    monkeypatch.setattr(fastokens, "Tokenizer", Limited)
    encoder = FastEncoder(content, ReferenceEncoder(reference))
    assert encoder.encode([CODE[0]])[0].tolist() == reference.encode(CODE[0], add_special_tokens=False).ids


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            content = content[int(name)] if isinstance(content, list) else content[name]
        content[int(last) if isinstance(content, list) else last] = value

    return apply


SPLIT = "pre_tokenizer.pretokenizers"


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("gpt2", change("model.type", "WordPiece"), "WordPiece, not BPE"),
        ("gpt2", change("model.dropout", 0.1), "dropout"),
        ("gpt2", change("model.end_of_word_suffix", "</w>"), "end_of_word_suffix"),
        ("gpt2", lambda content: content["model"]["vocab"].pop("ł"), "lacks some bytes"),
        ("gpt2", lambda content: content["model"]["vocab"].update({"a" * 5000: 1500}), "a token of 5,000 bytes"),
        ("gpt2", lambda content: content["model"]["merges"].append(content["model"]["merges"][0]), "a merge twice"),
        ("gpt2", change("normalizer", {"type": "NFC"}), "normalizer NFC"),
        ("gpt2", lambda content: content["added_tokens"][0].update(special=False), "not special"),
        ("gpt2", change("pre_tokenizer", None), "none of those"),
        ("gpt2", change("pre_tokenizer", {"type": "Whitespace"}), "none of those"),
        ("gpt2", change("pre_tokenizer.add_prefix_space", True), "adds a space"),
        ("gpt2", change("pre_tokenizer.use_regex", False), "never or twice"),
        ("trained", change(f"{SPLIT}.1.use_regex", True), "never or twice"),
        ("trained", change(f"{SPLIT}.0.behavior", "Removed"), "none of those"),
        ("trained", change(f"{SPLIT}.0.invert", True), "none of those"),
        ("trained", change(f"{SPLIT}.0.pattern", {"String": " "}), "pattern"),
        ("trained", change(f"{SPLIT}.0.pattern", {"Regex": r"\w+"}), "pattern"),
        ("trained", change(f"{SPLIT}.0", {"type": "Digits", "individual_digits": True}), "none of those"),
    ],
)
def test_other_tokenizers_are_left_to_the_reference(
    kind: str, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    content = json.loads(tokenizer_of(kind))
    assert unsupported(content) is None
    change(content)
    found = unsupported(content)
    assert found is not None
    assert reason in found
    encoder = make_encoder(reference_of(tokenizer_of(kind)), json.dumps(content).encode())
    assert isinstance(encoder, ReferenceEncoder)
    assert encoder.description.startswith("tokenizers ")
    assert found in encoder.description


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = make_encoder(reference_of(tokenizer_of("gpt2")), tokenizer_of("gpt2"))
    assert "fastokens is not installed" in encoder.description


def test_other_ids_are_found_when_it_is_made() -> None:
    """The reference has one merge more than the file that fastokens reads."""
    content = json.loads(tokenizer_of("gpt2"))
    content["model"]["merges"] = content["model"]["merges"][1:]
    encoder = make_encoder(reference_of(tokenizer_of("gpt2")), json.dumps(content).encode())
    assert isinstance(encoder, ReferenceEncoder)
    assert "other ids for the text of the self-check" in encoder.description


def test_shards_are_the_same_with_either(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is the same too, and the report names the package."""
    corpus = tmp_path / "corpus.jsonl"
    parts = [text for code in CODE for text in code.split("\n\n") if text.strip()]
    corpus.write_text("".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number, text in enumerate(parts)))
    found = []
    for package in ("fastokens", "tokenizers"):
        if package == "tokenizers":
            monkeypatch.setitem(sys.modules, "fastokens", None)
        source = {"kind": "jsonl", "paths": [str(corpus)]}
        config = make_config(source, vocab_size=500, workers=1, cache=str(tmp_path / package))
        shards = prepare(config, say=lambda line: None)
        report = json.loads((shards.path / "report" / "report.json").read_text())
        assert report["encoder"].startswith(f"{package} ")
        assert f"Encoded with {package} " in (shards.path / "report" / "report.html").read_text()
        files = [path for path in sorted(shards.path.rglob("*")) if path.is_file() and path.parent.name != "report"]
        found.append([(path.relative_to(shards.path), path.read_bytes()) for path in files])
        assert len(files) > 2
    assert found[0] == found[1]
