"""Training on each device as a whole: the same bits twice and after a kill, ZeRO's gradients, export and generation.

On a CPU the tiny configuration is made smaller. On a GPU it runs as it is, in bfloat16; its text needs no pipeline.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cdrmix.compare import compare
from cdrmix.config.schema import Config
from cdrmix.data.shard_files import write_index
from cdrmix.data.shard_writer import SplitWriter
from cdrmix.data.shards import FORMAT, SPLITS, token_dtype
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import write_checksummed
from cdrmix.hf.export import export_model
from cdrmix.inference.checkpoints import newest_whole_checkpoint
from cdrmix.inference.load import load_model
from cdrmix.inference.text_model import TextModel

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

CONFIG = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
VOCABULARY, ROW = 300, 64
STEPS = 6
COMMON = (
    f"model.vocab_size={VOCABULARY}",
    f"data.row_length={ROW}",
    f"train.steps={STEPS}",
    "train.micro_batch_rows=4",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.evaluate_every=3",
    "train.evaluate_rows=4",
    "train.checkpoint_every=2",
)
SMALL = (
    "model.d_model=32",
    "model.layers=2",
    "model.attention_fraction=0.5",
    "model.attention.heads=1",
    "model.attention.kv_heads=1",
    "model.feed_forward.hidden=16",
)


class Device(NamedTuple):
    """overrides: of the configuration. loss: how far its loss may be from float32 on a CPU; gradient: ZeRO's stages."""

    overrides: tuple[str, ...]
    loss: float
    gradient: float


DEVICES = {
    # Sums of the same float32 terms in another order: test_engine.py has the count.
    "cpu": Device((*SMALL, "run.device=cpu", "run.threads=1", "train.precision=fp32"), 1e-5, 222 * 2**-24),
    # Operands are rounded to 8 bits, 2^-9 each, in some tens of products of which a loss near ln V is a mean. Without
    # partitions the gradients of two micro-batches are added in float32 by the products; with them each is rounded
    # to bfloat16 first, 2^-9 of an element; four times that.
    "cuda": Device(("run.device=cuda", "train.precision=bf16"), 2**-7, 4 * 2 * 2**-9),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 160 invented documents."""
    folder = tmp_path_factory.mktemp("devices") / "shards"
    folder.mkdir()
    texts = [" ".join(f"word{(n * 7 + i * i) % 23} = {i % 9}" for i in range(4 + n % 17)) + "\n" for n in range(160)]
    tokenizer = TextTokenizer.train(texts, vocab_size=VOCABULARY, end_of_text="<|endoftext|>")
    splits, files = {}, {"tokenizer.json": write_checksummed(folder / "tokenizer.json", tokenizer.json_bytes)}
    for name, part in zip(SPLITS, (texts[:128], texts[128:]), strict=True):
        with SplitWriter(folder, name, vocab_size=VOCABULARY, shard_tokens=10_000, row_length=ROW) as writer:
            for text in part:
                ids = [*tokenizer.encode(text), tokenizer.end_of_text_id]
                writer.add(np.array(ids), len(text.encode()))
            splits[name] = writer.close()
        files |= writer.files
    index = {
        "format": FORMAT,
        "key": "invented",
        "vocab_size": VOCABULARY,
        "dtype": token_dtype(VOCABULARY),
        "shard_tokens": 10_000,
        "row_length": ROW,
        "length_classes": [],
        "end_of_text": tokenizer.end_of_text,
        "end_of_text_id": tokenizer.end_of_text_id,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "splits": splits,
        "files": files,
        "report": {},
    }
    write_index(folder, index)
    return folder


def checkpoint_bytes(run: Path) -> dict[str, bytes]:
    newest = newest_whole_checkpoint(run / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{STEPS:08d}"
    files = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    assert len(files) > 1, "weights and the optimizer's state"
    return files


@pytest.mark.slow
def test_two_runs_and_a_killed_one_have_the_same_bits_and_the_model_can_be_used(
    work, tmp_path: Path, corpus: Path, device: str
) -> None:
    overrides = (*COMMON, *DEVICES[device].overrides, f"run.root={tmp_path / 'runs'}")
    named = {"config": str(CONFIG), "shards": str(corpus)}
    (done,) = work("several", tmp_path / "runs", *overrides, runs=json.dumps({"one": [], "other": []}), **named)
    assert done.returncode == 0, done.stdout
    (done,) = work("train", tmp_path / "runs" / "killed", *overrides, at="3:SIGKILL", **named)
    assert done.returncode == -signal.SIGKILL, done.stdout
    (done,) = work("train", tmp_path / "runs" / "killed", *overrides, resume="auto", **named)
    assert done.returncode == 0, done.stdout
    one, other, killed = (checkpoint_bytes(tmp_path / "runs" / name) for name in ("one", "other", "killed"))
    assert one == other
    assert one == killed

    run = tmp_path / "runs" / "one"
    shutil.copy(corpus / "tokenizer.json", run / "tokenizer.json")
    loaded = load_model(run, torch.device(device))
    assert next(loaded.model.parameters()).device.type == device
    export = export_model(loaded, tmp_path / "export", summary={}, held_out_row=[5, 6, 7])
    assert compare(run, export).identical
    again = load_model(export, torch.device(device))
    texts = [TextModel(model).generate("word1 =", max_new_tokens=20) for model in (loaded, loaded, again)]
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]


def test_zero_has_the_gradients_of_one_process(work, tmp_path: Path, corpus: Path, device: str) -> None:
    where = tmp_path / "errors.json"
    overrides = (*COMMON, *DEVICES[device].overrides)
    (done,) = work("stages", where, *overrides, script="stages_worker.py", config=str(CONFIG), shards=str(corpus))
    assert done.returncode == 0, done.stdout
    errors = json.loads(where.read_text())
    for stage in (0, 1, 2, 3):
        assert errors[f"loss {stage}"] < DEVICES[device].loss, errors
        assert errors[f"gradient {stage}"] < DEVICES[device].gradient, errors


def test_the_configuration_on_a_gpu_is_the_released_one() -> None:
    config = Config.from_yaml(CONFIG, [*COMMON, *DEVICES["cuda"].overrides])
    released = Config.from_yaml(CONFIG, [])
    assert config.model.model_copy(update={"vocab_size": released.model.vocab_size}) == released.model
