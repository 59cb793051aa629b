"""The columns of the matrix that train: ZeRO stages, adapters, and a run that continues from a checkpoint.

The model is read from a folder, as `cdrmix train` reads it, and trained in the engine of cdrmix.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hf_tiny import LENGTH, Cell, batch, build, shown
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.errors import ConfigError
from cdrmix.hf.adapters import merge_adapters, trained_parameters, uncalled
from cdrmix.hf.build import build_foreign
from cdrmix.hf.foreign import ForeignLossModel, base_model, quiet, section_of
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.checkpoint import Fingerprints, Progress, load_checkpoint, save_checkpoint
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import PR_SET_PDEATHSIG

STEPS = 3
RATE = {"full": 1e-3, "adapters": 1e-2}
FINGERPRINTS = Fingerprints("tokenizer", "text")
FORK = multiprocessing.get_context("fork")


def preload() -> None:
    """Imports what every cell needs, so that the processes of the cells need not."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it advises to install kernels
    import deepspeed.runtime.zero.stage3  # noqa: F401
    import peft  # noqa: F401


def zero(architecture: str) -> Cell:
    """The largest differences from the weights of ZeRO stage 0: of stages 1 and 2, and of stage 3.

    Two processes train three steps. A difference is that of a weight, relative to the largest element of its tensor.
    Good: 0 and at most 1e-3. At stage 3 every weight is sharded, also the small ones.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        save(architecture, folder)
        other = FORK.Process(target=_other_process, args=(folder, port), daemon=True)
        other.start()
        plain, *others = _stages(folder, 0, port)
        other.join()
    first, second, third = (
        max(float((found[name] - weight).abs().max() / weight.abs().max()) for name, weight in plain.items())
        for found in others
    )
    replicated = max(first, second)
    return Cell(f"0-3 ({shown(replicated)}, {shown(third)})", replicated == 0.0 and third <= 1e-3)


def lora(architecture: str) -> Cell:
    """Whether adapters are trained, and how far the merged model is from the model with adapters.

    Three steps with the default settings of `model.lora`. Frozen weights must keep their bits, and every adapter must
    change. The distance is the largest difference of a logit, in standard deviations. Good: at most 1e-5.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(architecture, folder)
        started = start(configure(folder, lora={}))
        model: Any = started.loss_model.language_model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        adapters, silent = trained_parameters(model).keys(), uncalled(model)
        base = logits(base_model(started.config))
        train(started.engine, RATE["adapters"], range(STEPS))
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        settings = section_of(started.config).lora
        assert settings is not None
        merged = merge_adapters(base_model(started.config), settings, started.engine.weights(), origin=folder)
        adapted = logits(model)
    if frozen := sorted(changed - adapters):
        return Cell(f"{len(frozen)} frozen weights change: {frozen[0]}", good=False)
    if same := sorted(adapters - changed):
        why = "their layers are not called" if silent else "they have no gradient"
        return Cell(f"{len(same)} of {len(adapters)} adapters do not change ({why}): {same[0]}", good=False)
    effect, distance = (float((other - adapted).abs().max() / adapted.std()) for other in (base, logits(merged)))
    if effect < 0.01:
        return Cell(f"the adapters change the logits by only {shown(effect)}", good=False)
    return Cell(f"yes ({shown(distance)})", distance <= 1e-5)


def resume(architecture: str) -> Cell:
    """Whether three steps, a checkpoint, and three steps of another engine are six unbroken steps bit for bit.

    Weights, state of the optimizer and random generators are compared. The batches are drawn from torch's generator, so
    that its state counts. Good: all are equal.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(architecture, folder)
        started = start(configure(folder))
        train_random(started.engine)
        saved = save_checkpoint(
            started.engine, folder / "checkpoints", Progress(step=STEPS), started.config, FINGERPRINTS
        ).finish()
        train_random(started.engine)
        expected = state(started.engine)
        again = start(started.config, seed=1)
        load_checkpoint(again.engine, saved, again.config, FINGERPRINTS)
        train_random(again.engine)
        found = state(again.engine)
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if different:
        return Cell(f"{len(different)} of {len(expected)} tensors differ: {different[0]}", good=False)
    return Cell("bit for bit", good=True)


def free_port() -> str:
    """A port of this machine that no process has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def save(architecture: str, folder: Path) -> None:
    """Writes a tiny random model as transformers does."""
    with quiet():
        build(architecture).save_pretrained(folder)


class Started(NamedTuple):
    """An engine that is ready for its first step. config: with the packing that works."""

    config: Config
    loss_model: ForeignLossModel
    engine: Engine


def configure(folder: Path, *, stage: int = 0, processes: int = 1, lora: dict[str, Any] | None = None) -> Config:
    """A configuration that trains the model in a folder. Each process has two rows a step, in one micro-batch."""
    return Config.model_validate(
        {
            "run": {"device": "cpu", "threads": 1},
            "model": {"kind": "huggingface", "path": str(folder), "lora": lora},
            "data": {"source": {"kind": "stdlib"}, "row_length": LENGTH},
            "train": {
                "steps": 2 * STEPS,
                "batch_rows": 2 * processes,
                "micro_batch_rows": 2,
                "learning_rate": RATE["full"],
                "precision": "fp32",
                "zero_stage": stage,
                "gradient_clip": 1000.0,  # never: ZeRO sums the norm in another order than stage 0
            },
        }
    )


def start(config: Config, *, seed: int = 0) -> Started:
    """Makes the engine in the order of a run; with rows of single documents if the architecture isolates none."""
    world = join(config)
    seed_everything(seed)
    loss_model = build_foreign(config, world)
    engine = make_engine(config, loss_model, world, base=loss_model.base)
    try:
        loss_model.prepare()
    except ConfigError:
        section = section_of(config)
        if section.packing == "rows":
            raise
        return start(config.model_copy(update={"model": section.model_copy(update={"packing": "rows"})}), seed=seed)
    seed_everything(seed + world.rank)
    return Started(config, loss_model, engine)


def train(engine: Engine, rate: float, steps: range) -> None:
    """Steps on the batches with these numbers."""
    world = engine.world
    for step in steps:
        count = float(sum(batch(step * world.size + rank)[2].sum() for rank in range(world.size)))
        rows = Batch(*batch(step * world.size + world.rank), step, count)
        engine.set_learning_rate(rate)
        engine.backward(engine.forward(rows, last=True).total)
        engine.clip()
        assert engine.step(), "the norm of the gradient is finite"
        engine.zero()


def train_random(engine: Engine) -> None:
    """Steps on batches whose numbers are drawn from torch's generator."""
    for _ in range(STEPS):
        number = int(torch.randint(1 << 20, ()))
        train(engine, RATE["full"], range(number, number + 1))


def state(engine: Engine) -> dict[str, Tensor]:
    """A copy of the weights, of the state of the optimizer, and of torch's generator."""
    parts = {"weight": engine.weights(), "adamw": engine.optimizer_state(), "generator": {"": torch.get_rng_state()}}
    return {f"{part} {name}": tensor.clone() for part, tensors in parts.items() for name, tensor in tensors.items()}


def logits(model: Any) -> Tensor:
    """Of the ids of the first batch."""
    with torch.no_grad():
        return model.eval()(input_ids=batch()[0], use_cache=False).logits.float()


def _stages(folder: Path, rank: int, port: str) -> list[dict[str, Tensor]]:
    """The weights after training in one of two processes at each ZeRO stage; {} in the second process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deepspeed_config.PERSISTENCE_THRESHOLD = 0  # tiny weights would not be sharded
    found = []
    for stage in range(4):
        engine = start(configure(folder, stage=stage, processes=2)).engine
        if stage == 3:
            sharded: Any = engine.parameters.values()
            assert all(each.ds_tensor.numel() <= (each.ds_numel + 1) // 2 for each in sharded), "a weight is whole"
        train(engine, RATE["full"], range(STEPS))
        found.append(engine.weights())
    return found


def _other_process(folder: Path, port: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the first process may be killed after its time limit
    _stages(folder, 1, port)
