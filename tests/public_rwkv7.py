"""Random RWKV-7 weights in the public format, by the official names, and what the PyPI package `rwkv` makes of them.

Nothing here is of cdrmix: names and shapes are those of RWKV-x070-World-*.pth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import rwkv
import torch
from torch import Tensor

PACKAGE = Path(next(iter(rwkv.__path__)))
VOCABULARY = PACKAGE / "rwkv_vocab_v20230424.txt"
WIDTH, HEAD, HIDDEN, RANKS = 128, 64, 320, {"w": 8, "a": 16, "v": 24, "g": 32}  # all sizes are different


def public_weights(
    vocabulary: int = 300, layers: int = 3, width: int = WIDTH, head: int = HEAD, hidden: int = HIDDEN
) -> dict[str, Tensor]:
    """Float32 tensors whose sizes make every part of the model matter. Block 0 has v0, v1 and v2 too, as public files
    have."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*shape, generator=generator)

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(width, scale=0.1, mean=1), f"{name}.bias": normal(width, scale=0.1)}

    weights = {"emb.weight": normal(vocabulary, width, scale=1), **norm("blocks.0.ln0")}
    for layer in range(layers):
        att, ffn = f"blocks.{layer}.att", f"blocks.{layer}.ffn"
        weights |= norm(f"blocks.{layer}.ln1") | norm(f"blocks.{layer}.ln2") | norm(f"{att}.ln_x")
        for stream in "rwkvag":
            weights[f"{att}.x_{stream}"] = torch.rand(1, 1, width, generator=generator)
        for letter, rank in RANKS.items():
            if letter != "g":
                weights[f"{att}.{letter}0"] = normal(1, 1, width, scale=1, mean=-2 if letter == "w" else 0)
            weights[f"{att}.{letter}1"] = normal(width, rank, scale=width**-0.5)
            weights[f"{att}.{letter}2"] = normal(rank, width, scale=rank**-0.5)
        weights[f"{att}.k_k"] = normal(1, 1, width, scale=0.1, mean=0.7)
        weights[f"{att}.k_a"] = normal(1, 1, width, scale=0.1, mean=1)
        weights[f"{att}.r_k"] = normal(width // head, head, scale=0.3)
        for name in ("receptance", "key", "value", "output"):
            weights[f"{att}.{name}.weight"] = normal(width, width, scale=width**-0.5)
        weights[f"{ffn}.x_k"] = torch.rand(1, 1, width, generator=generator)
        weights[f"{ffn}.key.weight"] = normal(hidden, width, scale=width**-0.5)
        weights[f"{ffn}.value.weight"] = normal(width, hidden, scale=hidden**-0.5)
    return weights | norm("ln_out") | {"head.weight": normal(vocabulary, width, scale=width**-0.5)}


# In a process of its own: the package reads its settings from the environment when it is imported.
LOGITS = """
import sys, torch
from rwkv.model import RWKV
model = RWKV(model=sys.argv[1].removesuffix(".pth"), strategy="cpu fp32")
ids = torch.load(sys.argv[2])
whole, _ = model.forward(ids, None, full_output=True)
first, state = model.forward(ids[:17], None, full_output=True)
second, state = model.forward(ids[17:31], state, full_output=True)
third = []
for token in ids[31:]:
    logits, state = model.forward([token], state)
    third.append(logits)
torch.save((whole, torch.cat([first, second, torch.stack(third)])), sys.argv[2])
"""
TEXT = """
import sys, torch
from rwkv.model import RWKV
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER
model = RWKV(model=sys.argv[1].removesuffix(".pth"), strategy="cpu fp32")
vocabulary, prompt, count = torch.load(sys.argv[2])
tokenizer, ids = TRIE_TOKENIZER(vocabulary), []
logits, state = model.forward([0, *tokenizer.encode(prompt)], None)  # 0 ends the document before
for _ in range(count):
    ids.append(int(logits[1 : len(tokenizer.idx2token) + 1].argmax()) + 1)  # ids that are tokens of text
    logits, state = model.forward(ids[-1:], state)
torch.save(b"".join(tokenizer.idx2token[token] for token in ids), sys.argv[2])
"""


def _run(program: str, weights: Path, given: object) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given_and_result.pt"
        torch.save(given, file)
        environment = {"RWKV_V7_ON": "1", "RWKV_CUDA_ON": "0", "RWKV_JIT_ON": "0", "PYTHONSAFEPATH": "1", "PATH": ""}
        process = forked.start(["-c", program, weights, file], environment)
        assert process.wait(timeout=120) == 0, process.output
        return torch.load(file)


def logits_of_the_package(weights: Path, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [T, V] in float32 of a .pth file: of a pass over all ids, and of 17, then 14, then one at a time."""
    assert len(ids) > 31
    whole, split = _run(LOGITS, weights, list(ids))
    return whole, split


def text_of_the_package(weights: Path, vocabulary: Path, prompt: str, count: int) -> bytes:
    """The bytes of the most likely tokens after a prompt, with the package's own tokenizer."""
    text: bytes = _run(TEXT, weights, (str(vocabulary), prompt, count))
    return text
