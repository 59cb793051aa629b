"""The vocabulary of RWKV World models as a tokenizer, against the tokenizer of the package `rwkv`; wrong files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from public_rwkv7 import VOCABULARY
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

from cdrmix.data.chat.encoding import ChatEncoder
from cdrmix.data.chat.rendering import Rendered
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import VocabularyError

END = "<|rwkv_tokenizer_end_of_text|>"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The single bytes and every eighth other token of the public vocabulary, which takes seconds to load; numbered
    from 1 on."""
    lines = VOCABULARY.read_text(encoding="utf-8").rstrip("\n").split("\n")
    tokens = [line.partition(" ")[2] for line in [*lines[:256], *lines[256::8]]]
    path = tmp_path_factory.mktemp("rwkv") / "vocabulary.txt"
    numbered = "\n".join(f"{number} {token}" for number, token in enumerate(tokens, 1))
    path.write_text(numbered, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def world(vocabulary: Path) -> TextTokenizer:
    return TextTokenizer.load(vocabulary)


@pytest.fixture(scope="module")
def package(vocabulary: Path) -> TRIE_TOKENIZER:
    return TRIE_TOKENIZER(str(vocabulary))


def any_text() -> st.SearchStrategy[str]:
    """Text of any characters, and of pieces of which tokens consist: runs, white space, digits, cut characters."""
    words = [END, "the", " the", "ing", "  ", "\n", "\r\n", "\t", "=" * 7, "-", "0", "12", "中国", "的", "が", "é"]
    hostile = [
        "e\u0301",
        "\U0001f468\u200d\U0001f469",
        "\u2028",
        "\0",
        "\x85",
        "\ufeff",
        "\U0010ffff",
        "'",
        '"',
        "[^a]",
    ]
    pieces = st.sampled_from([*words, *hostile])
    return st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(pieces, max_size=60).map("".join))


@given(any_text())
def test_ids_are_those_of_the_package(world: TextTokenizer, package: TRIE_TOKENIZER, text: str) -> None:
    ids = world.encode(text)
    assert ids == package.encode(text)
    assert world.decode_bytes(ids) == text.encode()
    assert all(token != world.end_of_text_id for token in ids)
    ((with_bytes, counts),) = world.encode_with_bytes([text])
    assert with_bytes.tolist() == ids
    assert counts.sum() == len(text.encode())


def check_long(tokenizer: TextTokenizer, package: TRIE_TOKENIZER, points: str) -> None:
    """Runs of a character are where the expression goes deepest."""
    runs = "".join(character * count for character in " =-#\n\t0a的" for count in (1, 63, 64, 65, 127, 128, 129, 1000))
    texts = [points, runs, Path(__file__).read_text() * 20, ""]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == package.encode(text)


def check_table(tokenizer: TextTokenizer, package: TRIE_TOKENIZER) -> None:
    end = (tokenizer.end_of_text, tokenizer.end_of_text_id, tokenizer.first_id, tokenizer.lossless)
    assert end == (END, 0, 0, True)
    assert {token: tokenizer.token_bytes(token) for token in package.idx2token} == package.idx2token
    assert tokenizer.token_bytes(0) == b""
    # stage B uses bytes that UTF-8 does not have as marks
    assert all(tokenizer.token_bytes(1 + byte) == bytes([byte]) for byte in range(256))


def test_long_runs_and_long_texts(world: TextTokenizer, package: TRIE_TOKENIZER) -> None:
    """With a character of each 64, which differ in their last byte."""
    check_long(world, package, "".join(chr(point) for point in range(0, 0x110000, 64) if not 0xD800 <= point < 0xE000))


def test_the_table_of_bytes_is_that_of_the_file(world: TextTokenizer, package: TRIE_TOKENIZER) -> None:
    check_table(world, package)


@pytest.mark.slow
def test_the_whole_vocabulary() -> None:
    whole, package = TextTokenizer.load(VOCABULARY), TRIE_TOKENIZER(str(VOCABULARY))
    assert whole.vocab_size == 65_530
    assert package.idx2token.keys() == {*range(1, 65_530)}
    check_table(whole, package)
    check_long(whole, package, "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000))


def test_the_stored_file_is_the_same_tokenizer(world: TextTokenizer, vocabulary: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(world.json_bytes)
    stored = TextTokenizer.load_stored(tmp_path / "tokenizer.json", None)
    assert stored.fingerprint == world.fingerprint
    assert stored.encode("x = 'é'  # 狐狸\n\n") == world.encode("x = 'é'  # 狐狸\n\n")
    shuffled = tmp_path / "shuffled.txt"  # the order of the lines means nothing
    lines = vocabulary.read_text(encoding="utf-8").split("\n")
    shuffled.write_text("\r\n".join(reversed(lines)), encoding="utf-8", newline="")
    assert TextTokenizer.load(shuffled).fingerprint == world.fingerprint


def test_special_tokens_can_be_added_for_conversations(world: TextTokenizer, vocabulary: Path) -> None:
    chat = TextTokenizer.load(vocabulary, END, added_tokens=["<|im_start|>", "<|im_end|>"])
    start, end = (chat.special_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (start, end, chat.vocab_size) == (world.vocab_size, world.vocab_size + 1, world.vocab_size + 2)
    text = "<|im_start|>user\nis <|im_end|> text?<|im_end|>"
    encoded = ChatEncoder(chat).encode([Rendered(text, ((0, 12), (len(text) - 10, len(text))), (), 0)])[0]
    expected = [start, *world.encode("user\nis <|im_end|> text?"), end, 0]
    assert np.array_equal(encoded.ids, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:100] + lines[101:], "has no token for 1 of the 256 bytes, the first is 0x64"),
        (lambda lines: [*lines, "256 'ab' 2"], ":257: the id 256 is not the first one"),
        (lambda lines: [*lines, "257 'a' 1"], ":257: the token b'a' is not the first one"),
        (lambda lines: [*lines, "0 'ab' 2"], ":257: the id 0 is not the first one"),
        (lambda lines: [*lines, "257 'ab' 3"], ":257: the token b'ab' has 2 bytes; the line says 3"),
        (lambda lines: [*lines, "257 exit() 3"], r":257: found '257 exit\(\) 3'; allowed: an id, a Python literal"),
        (lambda lines: [*lines, "257 'a''b' + exit() 3"], ":257: found"),
        (lambda lines: [*lines, "257 '' 0"], ":257: found"),
        (lambda lines: [*lines, "257 b'\\x' 1"], ":257: found"),
        (lambda lines: [*lines, "99999999 'ab' 2"], ":257: found the id 99999999 and 2 bytes"),
        (lambda lines: [*lines, f"257 '{'a' * 600}' 600"], ":257: found the id 257 and 600 bytes"),
    ],
)
def test_wrong_files_are_refused_with_the_line(change: object, message: str, tmp_path: Path) -> None:
    lines = [f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]
    path = tmp_path / "vocabulary.txt"
    path.write_text("\n".join(lines))
    assert TextTokenizer.load(path).vocab_size == 257
    path.write_text("\n".join(change(lines)))  # type: ignore[operator]
    with pytest.raises(VocabularyError, match=message):
        TextTokenizer.load(path)
