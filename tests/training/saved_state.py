"""The optimizer's state in checkpoints, put together from its pieces, for tests of several layouts."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from cdrmix.config.schema import Config
from cdrmix.inference.checkpoints import read_weights
from cdrmix.training.checkpoint import Fingerprints, load_checkpoint, save_checkpoint
from cdrmix.training.digests import digest
from cdrmix.training.engine import Engine

FINGERPRINTS = Fingerprints("tokenizer", "text")


def optimizer_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The optimizer's state in a checkpoint, of whole parameters, flattened. Each element is in the files once."""
    weights, state, written = read_weights(checkpoint), {}, {}
    for path in sorted(checkpoint.glob("optimizer-rank*.safetensors")):
        for piece, value in load_file(path).items():
            name, key, *span = piece.split("/")
            if value.dim() == 0:
                assert state.setdefault(f"{name}/{key}", value) == value
                continue
            first, end = map(int, span[0].split("-")) if span else (0, weights[name].numel())
            assert span or value.shape == weights[name].shape
            whole = state.setdefault(f"{name}/{key}", torch.full((weights[name].numel(),), float("nan")))
            whole[first:end] = value.flatten()
            written.setdefault(f"{name}/{key}", torch.zeros(len(whole), dtype=torch.int))[first:end] += 1
    assert all(bool((count == 1).all()) for count in written.values())
    return state


def loads_the_state(engine: Engine, checkpoint: Path, config: Config) -> bool:
    """Loads a checkpoint of another layout; whether this layout saves the same bits of the optimizer's state."""
    progress, world = load_checkpoint(engine, checkpoint, config, FINGERPRINTS), engine.world
    folder = checkpoint.parent / f"{engine.stage}-{world.size}-{engine.expert_parallel}-{int(time.time())}"
    saved = save_checkpoint(
        engine, Path(world.gather(str(folder), "the test")[0]), progress, config, FINGERPRINTS
    ).finish()
    one, other = optimizer_state(checkpoint), optimizer_state(saved)
    assert any(value.abs().max() > 0 for value in one.values())
    weights, found = read_weights(checkpoint), engine.digests()
    for number, name in enumerate(engine.trained):
        state = [value for piece, value in sorted(one.items()) if piece.startswith(f"{name}/") and value.dim() > 0]
        assert found.weights[number] == digest(weights[name]), name
        assert found.state[number] == sum(factor * digest(value) for factor, value in enumerate(state, 1)), name
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
