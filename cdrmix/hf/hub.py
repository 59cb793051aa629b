"""Models of the Hugging Face hub: downloaded into the folder model.path before anything else of a run is done.

Of a repository only the files are downloaded that are read: safetensors, their index, descriptions, the tokenizer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.durable import disk_guard, sync_folder, wait_for_lock
from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.hf import adapters
from cdrmix.json_text import parse_json

FILES = ("model.safetensors", "model-*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
RECORD = Path(".cache", "cdrmix.json")  # name, revision and commit of a folder that was downloaded
TOKEN = "set HF_TOKEN to a token of your account (https://huggingface.co/settings/tokens), or log in by `hf auth login`"


def download(section: HuggingFaceModel, say: Callable[[str], None]) -> None:
    """Downloads the model into the folder model.path, if this does not exist.

    The files are written to a folder beside it, which is renamed when it is complete. A download that was stopped
    continues with the files that are there. Two processes do not download the same folder at the same time.
    Raises ConfigError if the hub does not have the model or refuses it, if it cannot be reached, and if the folder was
    downloaded as another revision; DiskFullError.
    """
    target, name, revision = section.named_folder, section.name_on_hub, section.revision or "main"
    assert target is not None, "the rules of the configuration refuse model.online without model.path"
    assert name is not None
    if target.is_dir():
        _check_revision(target, revision)
        return
    with (
        _failures(name, revision),
        disk_guard(f"the model {name} in {target.parent}", "Free some space and start again; it continues."),
    ):
        _download(target, name, revision, say)


def _download(target: Path, name: str, revision: str, say: Callable[[str], None]) -> None:
    from huggingface_hub import HfApi, snapshot_download

    described = HfApi().model_info(name, revision=revision)
    commit = described.sha
    present = [file.rfilename for file in described.siblings or ()]
    wanted = [file for file in present if "/" not in file and any(fnmatch(file, pattern) for pattern in FILES)]
    if commit is None or "config.json" not in wanted or not any(file.endswith(".safetensors") for file in wanted):
        raise ConfigError(
            f"model.path: {name} (revision {revision}) on the Hugging Face hub lacks config.json or model.safetensors; "
            "name a model that has them. Other weights (.bin, .gguf) are not read: they can run code, or are quantized"
        )
    say(f"Downloading {name} (revision {revision}, commit {commit[:12]}) from the Hugging Face hub to {target}")
    # A folder of its own for a commit: the files of two commits are never mixed.
    temporary = target.with_name(f".{target.name}.{commit[:12]}.download")
    record = temporary / RECORD
    record.parent.mkdir(parents=True, exist_ok=True)
    with _locked(record.parent / "cdrmix.lock"):
        if target.is_dir():  # another process has just finished it
            return
        for left in temporary.glob(".cache/huggingface/download/*.incomplete"):
            left.unlink(missing_ok=True)  # huggingface_hub begins a file that was cut off again, under another name
        snapshot_download(name, revision=commit, local_dir=temporary, allow_patterns=wanted)
        # Without the network, snapshot_download returns a folder whose files it cannot compare with a list.
        if missing := [file for file in wanted if not (temporary / file).is_file()]:
            raise ConfigError(f"model.path: {missing[0]} of {name} was not downloaded; {_reach()}")
        record.write_text(json.dumps({"name": name, "revision": revision, "commit": commit}), encoding="utf-8")
        temporary.rename(target)
        sync_folder(target.parent)


def _check_revision(folder: Path, revision: str) -> None:
    """Raises ConfigError if the folder was downloaded as another revision."""
    try:
        record = parse_json((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # not downloaded by cdrmix
    if revision not in (record["revision"], record["commit"]):
        raise ConfigError(
            f"model.revision: {revision}, but {folder} has the revision {record['revision']} (commit "
            f"{record['commit'][:12]}) of {record['name']}; name another folder in model.path, or delete this one"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process has this lock. The lock ends with the process."""
    with path.open("a") as file:
        wait_for_lock(
            file, lambda: print(f"cdrmix: waiting for another process, which has {path}", file=sys.stderr, flush=True)
        )
        yield


@contextmanager
def _failures(name: str, revision: str) -> Iterator[None]:
    """Raises what huggingface_hub and its network library raise as a ConfigError with a remedy."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ConfigError(f"model.online: needs the package huggingface_hub; {adapters.MISSING}") from error
    # RuntimeError: of hf_xet, which transfers large files. The bases of HfHubHTTPError are OSError and the error class
    # of the network library.
    failures: Any = (*errors.HfHubHTTPError.__bases__, errors.HFValidationError, json.JSONDecodeError, RuntimeError)
    try:
        yield
    except CdrmixError:
        raise
    except failures as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a file of this machine, for example a full disk
        raise ConfigError(f"model.path: {_explained(error, name, revision)}") from error


def _explained(error: Exception, name: str, revision: str) -> str:
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: ask for access at https://huggingface.co/{name}, then {TOKEN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the Hugging Face hub has no model {name} that this machine may read; the last two parts of model.path "
            f"are the name of the model. If the model is private, {TOKEN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision} on the Hugging Face hub; set model.revision to one that it has"
    if isinstance(error, errors.HFValidationError):
        return f"the last two parts, {name}, are not a name on the Hugging Face hub: {_first(error)}"
    if status in (401, 403):
        return f"the Hugging Face hub refuses {name} ({_first(error)}); ask for access to it, then {TOKEN}"
    return f"{name} was not downloaded ({_first(error)}); {_reach()}"


def _reach() -> str:
    return (
        "check that this machine reaches https://huggingface.co (or HF_ENDPOINT) and that HF_HUB_OFFLINE is not set, "
        "and start again; or copy the folder of the model to model.path"
    )


def _first(error: BaseException) -> str:
    """The beginning of a message as one line."""
    return re.sub(r"\s+", " ", str(error)).strip()[:160] or type(error).__name__
