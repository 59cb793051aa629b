"""The rungs of a ladder: their configurations by seed, what they cost, and their identity."""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.loader import dump_yaml
from cdrmix.config.schema import Config
from cdrmix.config.schema_data import Data
from cdrmix.config.schema_ladder import Ladder, LadderFile
from cdrmix.config.schema_model import Model
from cdrmix.durable import write_atomically
from cdrmix.errors import ConfigError
from cdrmix.gpus import gpu_by_key
from cdrmix.ladder.comparison import FOLDER, RUNG_FAMILIES, RungFigures, figures_of, rung_files
from cdrmix.registry import nearest

GPU, MFU = "h200", 0.4  # of the hours in the plan, as the defaults of `cdrmix ladder`
ModelFactory = Callable[[Config], Model]
DataFactory = Callable[[Config], Data]


@dataclass(frozen=True)
class RungPlan:
    """A rung: its configuration for each seed, and its figures (those of hours are of an assumed GPU)."""

    name: str
    configs: dict[int, Config]
    figures: RungFigures

    @property
    def config(self) -> Config:
        """That of the first seed."""
        return next(iter(self.configs.values()))

    @property
    def identity(self) -> str:
        """SHA-256 of the configurations of all seeds: rungs with the same identity have the same results."""
        text = " ".join(f"{seed}:{config.hash()}" for seed, config in self.configs.items())
        return hashlib.sha256(text.encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """What the ledger records of the plan."""
        figures = self.figures
        return {
            "name": self.name,
            "identity": self.identity,
            "seeds": list(self.configs),
            "parameters": figures.parameters,
            "active_parameters": figures.active_parameters,
            "flops_per_token": figures.flops_per_token,
            "tokens": figures.tokens,
            "compute": figures.compute,
            "steps": figures.steps,
            "batch_tokens": figures.batch_tokens,
            "learning_rate": figures.learning_rate,
        }


def ladder_of_family(family: str, overrides: Sequence[str] = ()) -> Ladder:
    """The ladder of a family of configs/ladder, below the working directory, with the default settings.

    overrides: `ladder.key=value` each. Raises ConfigError for an unknown family, and as a ladder file does.
    """
    if family not in RUNG_FAMILIES:
        close = nearest(family, RUNG_FAMILIES)
        hint = f"; did you mean {close}?" if close else ""
        raise ConfigError(f"--family: found {family!r}; allowed: {', '.join(RUNG_FAMILIES)}{hint}")
    files = sorted(rung_files([family]), key=lambda path: _figures(Config.from_yaml(path)).compute)
    names = [path.stem for path in files]
    ladder = Ladder(name=family, root=f"experiments/ladder-{family}", rungs=names)
    with tempfile.TemporaryDirectory(prefix="cdrmix-ladder-") as folder:  # the loader knows overrides
        path = Path(folder) / f"{family}.yaml"
        path.write_text(dump_yaml({"ladder": ladder.model_dump(mode="json")}), encoding="utf-8")
        return LadderFile.from_yaml(path, overrides).ladder


def read_ladder(path: Path, overrides: Sequence[str] = ()) -> tuple[Ladder, Path]:
    """The ladder of a file, and the folder of the file, in which names of rungs are looked up first.

    Raises ConfigError as LadderFile.from_yaml does, and says so if the file is that of a rung.
    """
    try:
        return LadderFile.from_yaml(path, overrides).ladder, path.parent
    except ConfigError as error:
        if _is_rung(path):
            raise ConfigError(
                f"{path} is the configuration of one model, a rung, and no ladder file. A ladder file names rungs: "
                f"`ladder: {{rungs: [{path.stem}, ...]}}`; `cdrmix train --config {path}` trains this rung alone"
            ) from error
        raise


def plan_rungs(
    ladder: Ladder,
    beside: Path | None = None,
    *,
    model_factory: ModelFactory | None = None,
    data_factory: DataFactory | None = None,
) -> list[RungPlan]:
    """The rungs of a ladder in their order.

    Args:
        ladder: the settings.
        beside: folder in which names of rungs are looked up before configs/ladder.
        model_factory, data_factory: return the sections `model` and `data` of a rung from its configuration.

    Raises:
        ConfigError: an unknown rung or seed, two rungs of one name, rungs that do not grow, `strict: false` without
            a reason, or what Config.from_yaml reports.
    """
    if not ladder.strict and ladder.reason is None:
        raise ConfigError("ladder.strict is false: ladder.reason must say why gates may fail; the ledger records it")
    if ladder.forecast.exponents[0] > ladder.forecast.exponents[1]:
        low, high = ladder.forecast.exponents
        raise ConfigError(f"ladder.forecast.exponents: found [{low}, {high}]; allowed: the smaller one first")
    paths = [_path(rung, beside) for rung in ladder.rungs]
    names = [path.stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"ladder.rungs: {name} occurs twice; allowed: each rung once")
    for name in ladder.seeds:
        if name not in names:
            raise ConfigError(f"ladder.seeds: there is no rung {name}; {_choices(name, names)}")
    rungs = []
    for name, path in zip(names, paths, strict=True):
        configs = {}
        first = Config.from_yaml(path, ladder.set).run.seed
        for seed in range(first, first + ladder.seeds.get(name, 1)):
            folder = Path(ladder.root) / "runs" / name / f"seed-{seed}"
            config = Config.from_yaml(path, [*ladder.set, f"run.seed={seed}", f"run.root={json.dumps(str(folder))}"])
            configs[seed] = _with_factories(config, model_factory, data_factory)
        rungs.append(RungPlan(name, configs, _figures(next(iter(configs.values())))))
    for smaller, larger in itertools.pairwise(rungs):
        if larger.figures.compute <= smaller.figures.compute:
            raise ConfigError(
                f"ladder.rungs: {larger.name} ({larger.figures.compute:.2e} operations) comes after {smaller.name} "
                f"({smaller.figures.compute:.2e}); allowed: rungs in the order of their operations"
            )
    return rungs


def rung_named(name: str, names: Sequence[str], option: str) -> str:
    """The rung with this name, or whose name ends with -NAME. Raises ConfigError with the nearest name."""
    if name in names:
        return name
    ends = [full for full in names if full.endswith(f"-{name}")]
    if len(ends) == 1:
        return ends[0]
    raise ConfigError(f"{option}: there is no rung {name}; {_choices(name, names)}")


def write_config(config: Config, folder: Path, name: str) -> Path:
    """Writes the configuration of a run to `folder`, for processes of their own. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-seed-{config.run.seed}.yaml"
    text = config.to_yaml()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)
    return path


def _choices(name: str, names: Sequence[str]) -> str:
    close = nearest(name, names)
    return f"there are {', '.join(names)}" + (f"; did you mean {close}?" if close else "")


def _path(rung: str, beside: Path | None) -> Path:
    """The file of a rung: a path, or a name."""
    if rung.endswith((".yaml", ".yml")):
        return Path(rung)
    folders = [*([beside] if beside is not None else []), FOLDER]
    for folder in folders:
        if (folder / f"{rung}.yaml").is_file():
            return folder / f"{rung}.yaml"
    found = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    close = nearest(rung, found)
    hint = f"; did you mean {close}?" if close else ""
    places = " or ".join(dict.fromkeys(str(folder) for folder in folders))
    raise ConfigError(f"ladder.rungs: there is no {rung}.yaml in {places}{hint}")


def _is_rung(path: Path) -> bool:
    try:
        Config.from_yaml(path)
    except ConfigError:
        return False
    return True


def _figures(config: Config) -> RungFigures:
    gpu = gpu_by_key(GPU)
    assert gpu is not None, GPU
    return figures_of(config, gpu, MFU)


def _with_factories(config: Config, model_factory: ModelFactory | None, data_factory: DataFactory | None) -> Config:
    """The configuration with the sections of the factories, checked as a file is."""
    sections: dict[str, Any] = {}
    for name, factory, kind in (("model", model_factory, Model), ("data", data_factory, Data)):
        if factory is not None:
            section = factory(config)
            if not isinstance(section, kind):
                raise ConfigError(
                    f"{name}_factory must return the section `{name}` of a configuration, an object of "
                    f"{kind.__module__}.{kind.__name__}; found {section!r}"
                )
            sections[name] = section
    if not sections:
        return config
    with tempfile.TemporaryDirectory(prefix="cdrmix-ladder-") as folder:  # the loader checks combinations of keys
        return Config.from_yaml(write_config(config.model_copy(update=sections), Path(folder), "factory"))
