"""Checkpoints: whole or not there, verified before they are read, pruned, and safe from a full disk."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError, DiskFullError, ShardError, VocabularyError
from cdrmix.inference.checkpoints import list_checkpoints, newest_whole_checkpoint, read_weights, verify_checkpoint
from cdrmix.runtime import seed_everything
from cdrmix.training import checkpoint_writer
from cdrmix.training.build import build_loss_model
from cdrmix.training.checkpoint import (
    Fingerprints,
    Progress,
    differences,
    load_checkpoint,
    restore_best,
    save_checkpoint,
)
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.retention import Rules, prune

pytestmark = pytest.mark.usefixtures("own_settings")

FINGERPRINTS = Fingerprints("tokenizer", "text")


@dataclass
class Run:
    engine: Engine
    config: Config
    folder: Path

    def save(self, step: int, *, periodic: bool = True, best_step: int | None = None) -> Path:
        progress = Progress(step=step, best_step=best_step)
        return save_checkpoint(
            self.engine, self.folder, progress, self.config, FINGERPRINTS, periodic=periodic
        ).finish()


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> Run:
    config = make_config("train.ema_decay=0.5")
    seed_everything(1)
    return Run(make_engine(config, build_loss_model(config), join(config)), config, tmp_path)


def test_a_checkpoint_gives_back_weights_average_and_generators(run: Run) -> None:
    assert run.engine.average is not None
    run.engine.average.tensors[0].add_(1.0)
    saved = run.save(7)
    drawn = torch.rand(3)
    before = run.engine.weights()
    kept = {name: weight.clone() for name, weight in before.items()}
    average = [tensor.clone() for tensor in run.engine.average.tensors]
    for weight in before.values():
        weight.zero_()  # the engine's own memory, on a CPU
    run.engine.average.tensors[0].zero_()
    assert load_checkpoint(run.engine, saved, run.config, FINGERPRINTS).step == 7
    assert torch.equal(torch.rand(3), drawn)
    for name, weight in run.engine.weights().items():
        assert torch.equal(weight, kept[name]), name
    assert all(map(torch.equal, run.engine.average.tensors, average))
    read = read_weights(saved)
    assert read.keys() == dict(run.engine.module.loss_model.language_model.named_parameters()).keys()
    assert all(torch.equal(read[name], kept[name]) for name in kept)
    assert torch.equal(read_weights(saved, average=True)[next(iter(kept))], average[0])


def test_moments_of_later_steps_are_gone(run: Run) -> None:
    """A run that goes back may have updated parameters that the checkpoint has no moments of."""
    saved = run.save(1)
    for parameter in run.engine.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    run.engine.optimizer.step()
    assert any(value.any() for value in run.engine.optimizer_state().values())
    load_checkpoint(run.engine, saved, run.config, FINGERPRINTS)
    assert not any(value.any() for value in run.engine.optimizer_state().values())


def test_nothing_in_a_checkpoint_is_a_pickle(run: Run) -> None:
    names = {path.name for path in run.save(1).iterdir()}
    assert names == {
        "model.safetensors",
        "ema.safetensors",
        "optimizer-rank0.safetensors",
        "rng-rank0.json",
        "state.json",
        "config_snapshot.yaml",
        "manifest.json",
    }


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-rank0.safetensors", "rng-rank0.json", "state.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [(damage_flip, "its SHA-256 is"), (damage_truncate, "bytes, the manifest says"), (Path.unlink, "is missing")],
)
def test_a_damaged_one_is_refused_and_the_one_before_it_found(
    run: Run, name: str, damage: Callable[[Path], None], message: str
) -> None:
    older, newer = run.save(2), run.save(4)
    assert newest_whole_checkpoint(run.folder) == newer
    damage(newer / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_checkpoint(newer)
    assert name in str(caught.value)
    assert caught.value.exit_code == 5
    said: list[str] = []
    assert newest_whole_checkpoint(run.folder, said.append) == older
    assert len(said) == 1
    assert newer.name in said[0]
    if name == "model.safetensors":
        with pytest.raises(CheckpointError):
            read_weights(newer)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 99, "files": {}}', '{"format": 1}'])
def test_a_manifest_that_is_none_is_refused(run: Run, text: str) -> None:
    saved = run.save(2)
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify_checkpoint(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="the checkpoint is incomplete"):
        verify_checkpoint(saved)
    assert newest_whole_checkpoint(run.folder) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("written", [0, 1])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_remains(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, written: int
) -> None:
    good = run.save(2)
    save_file, calls = checkpoint_writer.save_file, []

    def fills_up(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        save_file(tensors, path)
        if len(calls) > written:
            raise error

    monkeypatch.setattr(checkpoint_writer, "save_file", fills_up)
    with pytest.raises(DiskFullError) as caught:
        run.save(4)
    assert caught.value.exit_code == 6
    assert str(run.folder) in str(caught.value)
    assert sorted(path.name for path in run.folder.iterdir()) == ["latest", good.name]
    assert (run.folder / "latest").read_text().strip() == good.name
    verify_checkpoint(good)


def test_a_disk_that_fills_up_while_committing_leaves_nothing_half_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = run.save(2)

    def fails(path: Path, target: Path) -> Path:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(DiskFullError):
        run.save(4)
    monkeypatch.undo()
    assert list_checkpoints(run.folder) == [good]
    assert list(run.folder.glob("*.tmp-*")) == []


def test_a_folder_that_cannot_be_written_is_said_and_not_called_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(tensors: dict[str, torch.Tensor], path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint_writer, "save_file", refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        run.save(4)


def test_the_newest_periodic_ones_and_the_best_stay(run: Run) -> None:
    for step, periodic in ((1, True), (2, False), (3, True), (4, False), (5, True), (6, True)):
        saved = run.save(step, periodic=periodic, best_step=2)
    assert (run.folder / "best").read_text().strip() == "step-00000002"
    (run.folder / "step-00000007.tmp-99").mkdir()
    prune(run.folder, Rules(2), saved)
    assert [path.name[-1] for path in list_checkpoints(run.folder)] == ["2", "5", "6"]
    assert (run.folder / "latest").read_text().strip() == "step-00000006"
    assert list(run.folder.glob("*.tmp-*")) == []


def test_what_was_just_written_stays_and_not_the_corrupt_newer_one(run: Run) -> None:
    for step in (2, 6):
        newer = run.save(step)
    damage_flip(newer / "model.safetensors")
    saved = run.save(4)
    prune(run.folder, Rules(1), saved)
    assert list_checkpoints(run.folder) == [saved]
    saved = run.save(5, periodic=False)
    prune(run.folder, Rules(1), saved)
    assert [path.name[-1] for path in list_checkpoints(run.folder)] == ["4", "5"]


def test_the_best_pointer_follows_the_committed_progress(run: Run) -> None:
    for step in (2, 4, 6):
        run.save(step, best_step=min(step, 4))
    assert (run.folder / "best").read_text() == "step-00000004\n"
    (run.folder / "best").unlink()  # killed between a checkpoint and its pointer
    restore_best(run.folder, Progress(step=6, best_step=4))
    assert (run.folder / "best").read_text() == "step-00000004\n"
    restore_best(run.folder, Progress(step=2, best_step=2))  # the others were passed over
    assert (run.folder / "best").read_text() == "step-00000002\n"
    restore_best(run.folder, Progress(step=1))
    assert not (run.folder / "best").exists()


def test_a_corrupt_one_of_the_same_step_is_replaced(run: Run) -> None:
    saved = run.save(3)
    damage_flip(saved / "model.safetensors")
    run.save(3)
    verify_checkpoint(saved)
    assert list(run.folder.glob("*.tmp-*")) == []


def test_another_configuration_tokenizer_or_text_is_refused(run: Run, make_config: Callable[..., Config]) -> None:
    saved = run.save(3)
    from_a_file = make_config("train.ema_decay=0.5", "data.tokenizer.path=tokenizer.json")
    with pytest.raises(VocabularyError, match=r"data\.tokenizer\.path has changed") as vocabulary:
        load_checkpoint(run.engine, saved, from_a_file, Fingerprints("another", "other shards"))
    assert vocabulary.value.exit_code == 7
    for other in (Fingerprints("tokenizer", "another"), Fingerprints("trained on it", "another")):
        with pytest.raises(ShardError, match="the text has changed since this run began") as text:
            load_checkpoint(run.engine, saved, run.config, other)
        assert text.value.exit_code == 4
    with pytest.raises(ConfigError, match="config_snapshot") as config:
        load_checkpoint(run.engine, saved, make_config("train.learning_rate=0.5"), FINGERPRINTS)
    assert config.value.exit_code == 2


def test_another_layout_is_told(run: Run) -> None:
    saved = run.save(3)
    assert differences(saved, run.engine) == []
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"processes": 4, "zero_stage": 1, "expert_parallel": 2}))
    told = ["processes: 4 before, 1 now", "zero_stage: 1 before, 0 now", "expert_parallel: 2 before, 1 now"]
    assert differences(saved, run.engine) == told
    assert load_checkpoint(run.engine, saved, run.config, FINGERPRINTS).step == 3


def test_pieces_of_state_that_do_not_fit_are_refused(run: Run) -> None:
    for parameter in run.engine.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    run.engine.optimizer.step()
    saved = run.save(3)
    whole = load_file(saved / "optimizer-rank0.safetensors")
    name = next(key for key in whole if key.endswith("/exp_avg") and whole[key].dim() == 2)
    flat, size = whole[name].flatten(), whole[name].numel()

    def load(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {key: value for key, value in whole.items() if key != name}
        path = saved / "optimizer-rank0.safetensors"
        save_file(others | pieces, path)
        with torch.no_grad():
            for state in run.engine.optimizer.state.values():
                for value in state.values():
                    value.fill_(float("nan"))
        load_checkpoint(run.engine, saved, run.config, FINGERPRINTS)
        return run.engine.optimizer_state()

    halves = {f"{name}/0-{size // 2}": flat[: size // 2], f"{name}/{size // 2}-{size}": flat[size // 2 :]}
    found = load(halves)
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[key]) for key, value in found.items())
    for number, lacking in ((0, 0), (1, size // 2)):
        part = dict([[*halves.items()][1 - number]])
        with pytest.raises(CheckpointError, match=f"no exp_avg of {name.split('/')[0]} from element {lacking} on"):
            load(part)
    with pytest.raises(CheckpointError, match=r"optimizer state of partition0, which is no parameter of this model"):
        load({"partition0/exp_avg": flat})


def test_a_checkpoint_of_a_version_with_one_file_of_state_is_loaded(run: Run) -> None:
    for parameter in run.engine.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    run.engine.optimizer.step()
    saved = run.save(3)
    expected = {name: value.clone() for name, value in run.engine.optimizer_state().items()}
    (saved / "optimizer-rank0.safetensors").rename(saved / "optimizer.safetensors")
    manifest = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(manifest.replace("optimizer-rank0.safetensors", "optimizer.safetensors"))
    with torch.no_grad():
        for state in run.engine.optimizer.state.values():
            for value in state.values():
                value.fill_(7.0)
    load_checkpoint(run.engine, saved, run.config, FINGERPRINTS)
    found = run.engine.optimizer_state()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
