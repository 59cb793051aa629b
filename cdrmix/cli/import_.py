"""`cdrmix import`: a model of a file of public RWKV-7 weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "make a model of a file of public RWKV-7 weights: a read-only folder, as of export, for every --model"
    import_ = commands.add("import", run, text)
    text = "a .pth file, such as RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth, or .safetensors with its names"
    import_.add_argument("weights", type=Path, metavar="WEIGHTS", help=text)
    text = "the tokenizer of the model: a vocabulary (rwkv_vocab_v20230424.txt), a tokenizer.json or its folder"
    import_.add_argument("--tokenizer", required=True, type=Path, metavar="FILE", help=text)
    import_.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to create")


def run(options: argparse.Namespace) -> int:
    from cdrmix.hf.import_rwkv import import_rwkv7

    print(import_rwkv7(options.weights, options.tokenizer, options.out))
    return 0
