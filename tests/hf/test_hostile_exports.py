"""Exports that come from elsewhere: sizes, types and names in them are compared before memory is allocated."""

from __future__ import annotations

import contextlib
import itertools
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import main
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.hf.export import write_sums
from cdrmix.inference.load import SUMS, build

SNAPSHOT = "config_snapshot.yaml"
Exported = Callable[[str], Path]


def rewritten(folder: Path, export: Path) -> Path:
    """A copy of an export whose files may be changed; `write_sums` then makes it whole, as one who sends it would."""
    shutil.copytree(export, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / SUMS).unlink()
    return folder


def integers(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of all integers."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from integers(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Allocating 2 GiB more fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", ["hybrid", "bigrams"])
def test_no_size_of_a_configuration_is_believed(kind: str, exported: Exported) -> None:
    """Every integer of the section model, far beyond what the files hold: it is refused before memory is allocated, or
    it is no size of the weights and the model loads."""
    snapshot, weights = exported(kind) / SNAPSHOT, load_file(exported(kind) / "model.safetensors")
    loaded = set()
    for path, size in itertools.product(integers(yaml.safe_load(snapshot.read_text())["model"]), (500_000, 1 << 62)):
        with little_memory(), contextlib.suppress(CheckpointError, ConfigError):
            build(Config.from_yaml(snapshot, [f"model.{'.'.join(path)}={size}"]), weights, origin=snapshot)
            loaded.add(path)
    assert not loaded & {(key,) for key in ("layers", "d_model", "vocab_size")}
    sizes = {"experts", "hidden", "heads", "rows", "head_dim", "d_state", "head_size", "decay_rank"}
    assert not {path[-1] for path in loaded} & sizes


def test_weights_of_other_types_names_and_shapes_are_refused(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with exit code 5, and each named. Types of half the width are read."""
    folder = rewritten(tmp_path / "export", exported("dense"))
    weights = load_file(folder / "model.safetensors")
    name = "blocks.1.mixer.output.weight"
    whole = weights[name]
    changes: dict[str, Callable[[], dict[str, Tensor]]] = {
        f"has {name} with the type int8": lambda: {name: whole.to(torch.int8)},
        f"has {name} with the type float8_e4m3fn": lambda: {name: whole.to(torch.float8_e4m3fn)},
        f"has {name} with the type bool": lambda: {name: whole > 0},
        f"has {name} with shape [1]": lambda: {name: whole.flatten()[:1].clone()},
        "has, in addition to those of the model, 1 tensors, the first is other": lambda: {"other": whole.clone()},
        "": lambda: {name: whole.half()},
    }
    for message, change in changes.items():
        save_file(weights | change(), folder / "model.safetensors")
        (folder / SUMS).unlink(missing_ok=True)
        write_sums(folder)
        status = main(["generate", "--model", str(folder), "--max-new-tokens", "1"])
        assert (status, message in capsys.readouterr().err) == (5 if message else 0, True), message


def test_a_configuration_of_endless_layers_is_refused(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command: the configuration of an export says what its files do not hold."""
    folder = rewritten(tmp_path / "export", exported("dense"))
    text = (folder / SNAPSHOT).read_text()
    for key, size, message in (
        ("layers", 1024, "has 2 blocks; model.layers is 1024"),
        ("d_model", 1 << 16, "has embedding.weight with shape [300, 32]; the configuration needs [300, 65536]"),
    ):
        (folder / SNAPSHOT).write_text(re.sub(rf"(?m)^  {key}: .*$", f"  {key}: {size}", text))
        (folder / SUMS).unlink(missing_ok=True)
        write_sums(folder)
        with little_memory():
            assert main(["generate", "--model", str(folder)]) == 5
        assert message in capsys.readouterr().err
