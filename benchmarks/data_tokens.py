"""The data suite's case of tokenisation: the encoder of the preparation against the tokenizers package, and tiktoken.

Each measurement is a process of its own, in which all packages have the same number of threads. They encode the same
texts in turns. Speed is in megabytes of text a second of CPU time of all threads, so that other work on the machine has
little effect. Results become arrays of ids, since that is what the preparation needs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases import Options, Result

TEXT_BYTES = 1_000_000  # of code; a round takes the tokenizers package half a second for each tokenizer
HOSTILE_BYTES = 300_000
TRAINING_BYTES = 500_000
VOCABULARY = 4096
THREADS = (1, 2)
OURS, REFERENCE, TIKTOKEN = "cdrmix", "tokenizers", "tiktoken"
# Letters of twelve scripts, by range of code points.
SCRIPTS = (
    (0x61, 0x7B),
    (0xE0, 0x100),
    (0x3B1, 0x3CA),
    (0x430, 0x450),
    (0x5D0, 0x5EB),
    (0x627, 0x64B),
    (0x904, 0x93A),
    (0xE01, 0xE31),
    (0x3041, 0x3097),
    (0x4E00, 0x9FA6),
    (0xAC00, 0xD7A4),
    (0x1F600, 0x1F650),
)


def tokens(options: Options, texts: list[str]) -> Result:
    """Both encoders with three tokenizers, on code and on hostile text, with one and with two threads."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_inputs(folder, texts)
        rounds = max(3, options.blocks // 10)
        found = {threads: run(folder, threads, rounds, options.without) for threads in THREADS}
    figures: dict[str, float | None] = {}
    for threads, timings in found.items():
        suffix = "" if threads == 1 else f"_{threads}_threads"
        for name, measured in timings["timings"].items():
            kind = "" if name == "trained.code" else "_" + name.removeprefix("trained.").replace(".", "_")
            ratios = [r / o for r, o in zip(measured[REFERENCE], measured[OURS], strict=True)]
            figures[f"speed_over_tokenizers{kind}{suffix}"] = statistics.median(ratios)
            if TIKTOKEN in measured:
                ratios = [r / o for r, o in zip(measured[TIKTOKEN], measured[OURS], strict=True)]
                figures[f"speed_over_tiktoken{kind}{suffix}"] = statistics.median(ratios)
            figures[f"wrong_texts{kind}{suffix}"] = timings["wrong"][name]
    one = found[1]
    size = one["megabytes"]
    figures["megabytes_a_cpu_second"] = size["code"] / statistics.median(one["timings"]["trained.code"][OURS])
    return Result(
        unit="MB of text a CPU second",
        peer_name=REFERENCE,
        ours=[size["code"] / seconds for seconds in one["timings"]["trained.code"][OURS]],
        peer=[size["code"] / seconds for seconds in one["timings"]["trained.code"][REFERENCE]],
        figures=figures,
        settings={"device": "cpu", "megabytes": size, "vocabulary": VOCABULARY, "encoder": one["encoder"]},
        absent=one["absent"],
    )


def write_inputs(folder: Path, texts: list[str]) -> None:
    """Writes the texts and three tokenizers: trained here, GPT-2's pattern, and Llama 3's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from cdrmix.data.batch_encoder import PATTERNS
    from cdrmix.data.tokenizer import TextTokenizer

    code = [*up_to(TEXT_BYTES, iter(texts))]
    (folder / "code.texts").write_text(json.dumps(code))
    (folder / "hostile.texts").write_text(json.dumps([*up_to(HOSTILE_BYTES, hostile_texts())]))
    some = [*up_to(TRAINING_BYTES, iter(code[::2]))]
    trained = TextTokenizer.train(some, vocab_size=VOCABULARY, end_of_text="<|endoftext|>")
    (folder / "trained.json").write_bytes(trained.json_bytes)
    split = pre_tokenizers.Split(Regex(PATTERNS["llama3"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, step in (
        ("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("llama3", pre_tokenizers.Sequence([split, byte_level])),
    ):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = step, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(some, trainer)
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(folder / f"{name}.json"))


def up_to(most: int, texts: Iterator[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        if size >= most:
            return
        size += len(text.encode())
        yield text


def hostile_texts() -> Iterator[str]:
    """Words of random letters of all scripts, with numbers, marks and white space."""
    rng = random.Random(1)
    gaps = (" ", " ", " ", "  ", "\n", ", ", "\r\n\t", "'s ", "...", "\u3000", "\u200d", " 12345 ", "\u0301", "_")
    while True:
        words = []
        for _ in range(500):
            first, end = rng.choice(SCRIPTS)
            words += ["".join(chr(rng.randrange(first, end)) for _ in range(rng.randint(1, 12))), rng.choice(gaps)]
        yield "".join(words)


def run(folder: Path, threads: int, rounds: int, without: tuple[str, ...]) -> dict[str, Any]:
    """What the process of this file prints."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "FASTOKENS_BPE_THREADS": str(threads)}
    environment["TOKENIZERS_PARALLELISM"] = "true"
    command = [sys.executable, __file__, str(folder), str(threads), str(rounds), *without]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, threads: int, rounds: int, without: list[str]) -> dict[str, Any]:
    """CPU seconds by tokenizer and text, package and round; the number of wrong texts; why a peer is absent."""
    import numpy as np

    from cdrmix.data.batch_encoder import ReferenceEncoder
    from cdrmix.data.tokenizer import TextTokenizer

    texts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.texts"))}
    result: dict[str, Any] = {"timings": {}, "wrong": {}, "absent": {}}
    result["megabytes"] = {name: sum(len(text.encode()) for text in some) / 1e6 for name, some in texts.items()}
    for path in sorted(folder.glob("*.json")):
        tokenizer = TextTokenizer.load(path)
        result["encoder"] = tokenizer.encoder.description
        encoders: dict[str, Callable[[list[str]], list[Any]]] = {
            OURS: tokenizer.encoder.encode,
            REFERENCE: ReferenceEncoder(tokenizer._tokenizer).encode,
        }
        if path.stem != "trained":
            try:
                encoders[TIKTOKEN] = tiktoken_encoder(json.loads(path.read_bytes()), path.stem, threads, without)
            except ImportError as error:
                result["absent"][TIKTOKEN] = str(error)
        for name, some in texts.items():
            key = f"{path.stem}.{name}"
            seconds: dict[str, list[float]] = {package: [] for package in encoders}
            for _ in range(rounds + 1):
                ids = {}
                for package, encode in encoders.items():
                    begun = time.process_time()
                    ids[package] = encode(some)
                    seconds[package].append(time.process_time() - begun)
            result["timings"][key] = {package: of_rounds[1:] for package, of_rounds in seconds.items()}
            pairs = zip(ids[OURS], ids[REFERENCE], strict=True)
            result["wrong"][key] = sum(not np.array_equal(found, expected) for found, expected in pairs)
    return result


def tiktoken_encoder(
    content: dict[str, Any], name: str, threads: int, without: list[str]
) -> Callable[[list[str]], list[Any]]:
    """tiktoken with the same vocabulary and pattern. Raises ImportError if it is not installed or left out."""
    import numpy as np

    if any(part in TIKTOKEN for part in without):
        raise ImportError("left out by --without")
    import tiktoken

    from cdrmix.data.batch_encoder import PATTERNS
    from cdrmix.data.token_bytes import byte_alphabet

    alphabet = byte_alphabet()
    ranks = {
        bytes(alphabet[character] for character in token): rank for token, rank in content["model"]["vocab"].items()
    }
    encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})

    def encode(texts: list[str]) -> list[Any]:
        return [np.array(ids, np.uint32) for ids in encoding.encode_ordinary_batch(texts, num_threads=threads)]

    return encode


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
