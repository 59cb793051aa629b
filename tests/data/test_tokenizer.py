"""The tokenizer gives every text back, byte for byte, and no text can end a document."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from cdrmix.data import tokenizer as tokenizer_module
from cdrmix.data.token_bytes import byte_alphabet
from cdrmix.data.tokenizer import TextTokenizer, pieces
from cdrmix.errors import ConfigError, VocabularyError

END = "<|endoftext|>"
CODE = [Path(module.__file__).read_text() for module in (json, subprocess, hashlib) if module.__file__]


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return TextTokenizer.train(CODE, vocab_size=600, end_of_text=END)


fragments = st.sampled_from(
    [END, "<|", "|>", "endoftext", " ", "    ", "\t", "\n", "\r\n", "\0", "\ufeff", "é", "e\u0301", "return", "9"]
)


@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(fragments).map("".join)))
def test_text_comes_back_and_never_ends_a_document(trained: TextTokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode_bytes(ids) == text.encode()
    assert trained.decode(ids) == text
    assert trained.end_of_text_id not in ids
    assert all(0 <= token < trained.vocab_size for token in ids)


def test_batches_are_the_texts_one_by_one(trained: TextTokenizer) -> None:
    texts = ["", "a", *CODE, END, ""]
    assert [ids.tolist() for ids in trained.encode_batch(texts)] == [trained.encode(text) for text in texts]


def test_it_compresses_and_keeps_indentation_together(trained: TextTokenizer) -> None:
    assert trained.vocab_size == 600
    text = CODE[0]
    assert len(text.encode()) / len(trained.encode(text)) > 2
    assert any(trained.decode([token]) == ":\n        " for token in range(trained.vocab_size))


def test_saved_and_loaded_it_is_the_same(trained: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.json_bytes)
    for loaded in (TextTokenizer.load(path), TextTokenizer.load(path, END)):
        assert loaded.fingerprint == trained.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
        assert loaded.end_of_text_id == trained.end_of_text_id
        assert loaded.encode(CODE[1]) == trained.encode(CODE[1])


def test_long_texts_are_cut_and_come_back(trained: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(tokenizer_module, "GROUP_CHARACTERS", 120)
    for text in ("", "x" * 50, "x" * 51, "y" * 1000, CODE[0], "\n" * 101):
        cut = list(pieces(text))
        assert "".join(cut) == text
        assert all(len(piece) <= 50 for piece in cut)
        assert trained.decode(trained.encode(text)) == text
    assert next(pieces("a\n" * 30)) == "a\n" * 25


def test_unused_and_special_ids_stand_for_no_text(trained: TextTokenizer) -> None:
    ids = trained.encode("x")
    assert trained.decode([trained.end_of_text_id, *ids, trained.vocab_size + 5]) == "x"
    assert trained.decode(trained.encode("é")[:1]) == "\ufffd"
    assert sum(trained.byte_lengths()[token] for token in trained.encode("naïve")) == 6


def test_little_text_gives_fewer_ids() -> None:
    small = TextTokenizer.train(["ab ab"], vocab_size=4096, end_of_text=END)
    assert 257 <= small.vocab_size < 300
    assert small.decode(small.encode("anything at all 東京")) == "anything at all 東京"


def test_the_number_of_threads_does_not_change_it() -> None:
    code = (
        "import json, subprocess, hashlib, pathlib; from cdrmix.data.tokenizer import TextTokenizer;"
        "texts = [pathlib.Path(m.__file__).read_text() for m in (json, subprocess, hashlib)] * 3;"
        "t = TextTokenizer.train(texts, vocab_size=900, end_of_text='<|endoftext|>');"
        "print(t.fingerprint, hashlib.sha256(repr([i.tolist() for i in t.encode_batch(texts)]).encode()).hexdigest())"
    )
    outputs = set()
    for settings in ({"TOKENIZERS_PARALLELISM": "false"}, {"RAYON_NUM_THREADS": "2"}, {"RAYON_NUM_THREADS": "5"}):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", **settings}
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_the_byte_alphabet_is_the_packages_own() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\0 \n~\x7f", "é\u00a0\u00ad", "東\U0001f642"):
        assert bytes(byte_alphabet()[character] for character in level.pre_tokenize_str(text)[0][0]) == text.encode()


def gpt2_like(change: Callable[[dict[str, Any]], None] = lambda content: None) -> bytes:
    """tokenizer.json of a byte-level tokenizer made without our code, then changed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, "<|other|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CODE, trainer)
    content = json.loads(tokenizer.to_str())
    change(content)
    return json.dumps(content).encode()


def normalize(content: dict[str, Any]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    content["normalizer"] = json.loads(tokenizer.to_str())["normalizer"]


def prefix_space(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def dropout(content: dict[str, Any]) -> None:
    content["model"]["dropout"] = 0.5


def drop_a_byte(content: dict[str, Any]) -> None:
    del content["model"]["vocab"]["\u0142"]  # 0xA0, which is in every no-break space
    content["model"]["merges"] = []


def word_level(content: dict[str, Any]) -> None:
    content["model"] = {"type": "WordLevel", "vocab": {"word": 0, "[UNK]": 1}, "unk_token": "[UNK]"}


def not_written_in_bytes(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["▁word"] = len(content["model"]["vocab"])


def test_a_tokenizer_made_elsewhere_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_like())
    loaded = TextTokenizer.load(tmp_path / "tokenizer.json", END)
    assert loaded.decode(loaded.encode(f"  {END}<|other|>\n")) == f"  {END}<|other|>\n"
    with pytest.raises(VocabularyError, match="2 special tokens"):
        TextTokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("change", [normalize, prefix_space, dropout, drop_a_byte, word_level, not_written_in_bytes])
def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(gpt2_like(change))
    with pytest.raises(VocabularyError, match=r"byte-level BPE|text back unchanged") as caught:
        TextTokenizer.load(path, END)
    assert caught.value.exit_code == 7
    assert str(path) in str(caught.value)


def added(**settings: bool) -> bytes:
    """A tokenizer with a further added token."""
    none = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}

    def add(content: dict[str, Any]) -> None:
        content["added_tokens"].append({"id": len(content["model"]["vocab"]), "content": "<think>", **none, **settings})

    return gpt2_like(add)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("settings", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_an_added_token_that_takes_spaces_is_refused(settings: dict[str, bool], special: bool, tmp_path: Path) -> None:
    """Unless it is special: then its name in a text is text."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(added(special=special, **settings))
    text = "a <think> b  <think>\n\n<think>\tc"
    if special or not {"lstrip", "rstrip"} & settings.keys():
        loaded = TextTokenizer.load(path, END)
        assert loaded.decode(loaded.encode(text)) == text
        return
    with pytest.raises(VocabularyError, match=r"its added token '<think>' takes the white space beside it"):
        TextTokenizer.load(path, END)
    loaded = TextTokenizer.load(path, END, lossless=False)
    assert not loaded.lossless
    assert loaded.decode(loaded.encode(text)) != text


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    for end_of_text in (END, None):
        with pytest.raises(VocabularyError, match=r"is not a tokenizer\.json"):
            TextTokenizer.load(path, end_of_text)


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [step, level]}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def with_id(number: int) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"]["vocab"].update({"zz": number})


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "endless expression": lambda content: content.update(pre_tokenizer=split("(a+)+$")),
    "words of no length": lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "map of characters": lambda content: content.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "every place replaced": lambda content: content.update(normalizer=replace("", "aa")),
    "each step ten times": lambda content: content.update(
        normalizer={"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 12}
    ),
    "a long text before each": lambda content: content.update(normalizer={"type": "Prepend", "prepend": "x" * 10**6}),
    "long when decoded": lambda content: content.update(decoder=replace("a", "a" * 10**6)),
    "an id of 32 bits": with_id(2**32 - 1),
    "an id above all tables": with_id(2**24),
    "no sign for the unknown": lambda content: content.update(
        model={"type": "WordLevel", "vocab": {"a": 2, END: 0, "<|other|>": 1}, "unk_token": "u"}
    ),
}


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(
    name: str, lossless: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_like(HOSTILE[name]))
    with pytest.raises(VocabularyError, match=r"from its publisher again|allowed are less than"):
        TextTokenizer.load(tmp_path / "tokenizer.json", END, lossless=lossless).encode("a" * 40 + "b")


def test_a_usual_replacement_is_no_growth(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        steps = [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581"), replace("\n", "<newline>")]
        content.update(normalizer={"type": "Sequence", "normalizers": steps}, decoder=replace("\u2581", " "))

    (tmp_path / "tokenizer.json").write_bytes(gpt2_like(change))
    assert TextTokenizer.load(tmp_path / "tokenizer.json", END, lossless=False).encode("a b\n")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path: cannot read .*nowhere\.json") as caught:
        TextTokenizer.load(tmp_path / "nowhere.json", END)
    assert caught.value.exit_code == 2


def test_an_end_of_text_that_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_like())
    with pytest.raises(VocabularyError, match=r"no token '</s>'.*'<\|endoftext\|>', '<\|other\|>'"):
        TextTokenizer.load(tmp_path / "tokenizer.json", "</s>")


def test_an_end_of_text_that_text_can_spell() -> None:
    with pytest.raises(VocabularyError, match="merges ordinary text into its end-of-text token 'return'"):
        TextTokenizer.train(CODE, vocab_size=600, end_of_text="return")


def test_further_special_tokens() -> None:
    """They have ids that no text gets, stand for no bytes, and are shown by name."""
    marks = ["<|fim_prefix|>", "<|fim_suffix|>"]
    tokenizer = TextTokenizer.train(CODE, vocab_size=400, end_of_text=END, special_tokens=marks)
    ids = [tokenizer.special_id(mark) for mark in marks]
    assert len({tokenizer.end_of_text_id, *ids}) == 3
    assert tokenizer.vocab_size == 400
    spelled = tokenizer.encode(f"{marks[0]}a{marks[1]}")
    assert not set(ids) & set(spelled)
    assert tokenizer.decode_with_special_tokens(spelled) == f"{marks[0]}a{marks[1]}"
    assert tokenizer.decode_bytes([ids[0], *tokenizer.encode("a"), ids[1]]) == b"a"
    assert tokenizer.decode_with_special_tokens([ids[0], *tokenizer.encode("é"), ids[1], tokenizer.end_of_text_id]) == (
        f"{marks[0]}é{marks[1]}{END}"
    )
    again = TextTokenizer(tokenizer.json_bytes, END)
    assert [again.special_id(mark) for mark in marks] == ids
    with pytest.raises(VocabularyError, match=r"no special token 'return'; its special tokens are '<\|endoftext\|>', "):
        tokenizer.special_id("return")


def test_options_of_training() -> None:
    texts = ["alpha beta gamma ﬁle\n" * 20, "once upon a time there was one rare word: zyzzyva\n"]
    plain = TextTokenizer.train(texts, vocab_size=400, end_of_text=END)
    short = TextTokenizer.train(texts, vocab_size=400, end_of_text=END, max_token_length=3)
    frequent = TextTokenizer.train(texts, vocab_size=400, end_of_text=END, min_frequency=10)
    assert max(plain.byte_lengths()) > 3 >= max(short.byte_lengths()) > 1
    assert frequent.vocab_size < plain.vocab_size
    assert frequent.encode("zyzzyva") == [byte for letter in "zyzzyva" for byte in frequent.encode(letter)]
    folded = TextTokenizer.train(texts, vocab_size=400, end_of_text=END, nfkc=True)
    assert not folded.lossless
    assert folded.encode("ﬁle") == folded.encode("file") != plain.encode("ﬁle")


RNG = random.Random(5)
# Without spaces; runs of white space and of punctuation.
LONG_RUNS = {
    "letters of DNA": lambda size: "".join(RNG.choices("ACGT", k=size)),
    "one letter": lambda size: "a" * size,
    "Chinese": lambda size: "".join(chr(RNG.randrange(0x4E00, 0x5A00)) for _ in range(size)),
    "Thai": lambda size: "กินข้าวแล้ว" * (size // 11),
    "spaces": lambda size: " " * size,
    "line ends": lambda size: "\n" * size,
    "a rule": lambda size: "x-" + "=" * size + "\n" * size,
}


@pytest.mark.parametrize("kind", LONG_RUNS)
def test_training_takes_linear_time_in_a_long_run(kind: str) -> None:
    """It takes time quadratic in the length of a word: the sum of the squares must not grow faster than the text."""
    trained_on = tokenizer_module._splitting(tokenizer_module.LONGEST_WORD)

    def steps(size: int) -> int:
        return sum((end - start) ** 2 for _, (start, end) in trained_on.pre_tokenize_str(LONG_RUNS[kind](size)))

    assert steps(8000) <= 2.5 * steps(4000)


def test_a_document_of_300_kB_without_spaces_is_trained_on_and_encoded() -> None:
    """Without a bound of the words this takes minutes: the time limit of the tests ends it."""
    for text in (LONG_RUNS["letters of DNA"](300_000), " " * 300_000):
        tokenizer = TextTokenizer.train([text, *CODE], vocab_size=300, end_of_text=END)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encoder.description.startswith("fastokens ")
        assert max(tokenizer.byte_lengths()) <= 4 * tokenizer_module.LONGEST_WORD


@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(fragments).map("".join)))
def test_words_of_usual_length_are_trained_on_as_they_are_encoded(text: str) -> None:
    whole, bounded = tokenizer_module._splitting(), tokenizer_module._splitting(tokenizer_module.LONGEST_WORD)
    for document in (text, *CODE):
        assert whole.pre_tokenize_str(document) == bounded.pre_tokenize_str(document)


def test_marks_are_added_to_a_tokenizer_without_them(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TextTokenizer.train(CODE, vocab_size=400, end_of_text=END).json_bytes)
    before = TextTokenizer.load(path, END)
    marks = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    after = TextTokenizer.load(path, END, added_tokens=marks)
    assert [after.special_id(mark) for mark in marks] == [before.vocab_size + number for number in range(3)]
    text = f"return x {marks[0]}"
    assert after.encode(text) == before.encode(text)
