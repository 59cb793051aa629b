"""Models that are downloaded: `cdrmix train` with a server on 127.0.0.1 that answers as the Hugging Face hub."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import main

from cdrmix import durable
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, CorpusError, DiskFullError
from cdrmix.hf import hub as downloads
from cdrmix.run_folder import RunFolder

huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")

NAME = "acme/Tiny-Llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHERS = ("pytorch_model.bin", "modeling_acme.py", "consolidated.safetensors", "tokenizer.py")  # are not downloaded


class Hub(ThreadingHTTPServer):
    """One model, whose files are those of a folder.

    gated: the status with which every file is refused, or 0. hidden: the end of names that it does not have. html: it
    answers with a page, as the portal of a network does. stall: a file of which only the first half is sent, once; then
    `stalled` is set and the connection stays open. sent: the files that were sent whole.
    """

    daemon_threads = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.folder = name, folder
        self.gated, self.hidden, self.html = 0, "nothing", False
        self.stall: str | None = None
        self.stalled, self.closing = threading.Event(), threading.Event()
        self.sent: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing: a client that is killed closes its connections."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """GET /api/models/NAME/revision/REVISION, GET /api/models/NAME/tree/COMMIT, HEAD and GET /NAME/resolve/COMMIT/FILE,
    as of https://huggingface.co."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        """No connection waits for another request: its thread ends."""
        self.send_header("Connection", "close")
        super().end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = self.path.partition("?")[0], self.server
        api, files = f"/api/models/{hub.name}/", f"/{hub.name}/resolve/{COMMIT}/"
        names = sorted(file.name for file in hub.folder.iterdir() if not file.name.endswith(hub.hidden))
        if hub.html:
            self.answer(200, b"<html>log in</html>")
        elif path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in names]
            self.answer(200, json.dumps({"id": hub.name, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"{api}revision/"):
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif path == f"{api}tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": (hub.folder / name).stat().st_size, "oid": "0" * 40}
                for name in names
            ]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith(files) and hub.gated:
            self.answer(hub.gated, headers={"X-Error-Code": "GatedRepo"})
        elif path.startswith(files) and path.removeprefix(files) in names:
            name = path.removeprefix(files)
            content = (hub.folder / name).read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, name)
        else:  # as the hub answers to who has not logged in
            self.answer(401, headers={"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, file: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file and self.server.stall == file:
            self.server.stall = None
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.closing.wait()
            return
        self.wfile.write(content)
        if file:
            self.server.sent.append(file)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in two shards with its tokenizer, and what a repository may have besides."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    described = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(described).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    texts = [f"def f{number}(x):\n    return x + {number}\n" for number in range(20)]
    tokenizer = TextTokenizer.train(texts, vocab_size=290, end_of_text="<|endoftext|>")
    (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in OTHERS:
        (folder / name).write_bytes(b"never read")
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    server = Hub(NAME, model)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub for commands in this process, as HF_ENDPOINT sets it for a new process."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return hub


def files_of(model: Path) -> set[str]:
    """The files of the repository that are downloaded."""
    return {file.name for file in model.iterdir()} - set(OTHERS)


def configuration(folder: Path, path: str, model: dict[str, Any] | None = None) -> Path:
    """Of two steps from the model at `path` in a folder."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n" * 3}) + "\n" for n in range(40)))
    content = {
        "run": {"root": str(folder / "runs"), "device": "cpu", "threads": 1},
        "model": {"kind": "huggingface", "path": str(folder / path), "online": True, **(model or {})},
        "data": {
            "source": {"kind": "jsonl", "paths": [str(text)]},
            "tokenizer": {"path": "model"},
            "row_length": 32,
            "cache": str(folder / "prepared"),
            "valid_fraction": 0.2,
            "dedup": {"near_duplicates": False},
        },
        "train": {
            "steps": 2,
            "batch_rows": 2,
            "micro_batch_rows": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "precision": "fp32",
        },
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def start(config: Path, hub: Hub) -> subprocess.Popen[str]:
    """`cdrmix train` in a process whose hub is the server."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(config.parent / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--config", str(config)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_killed_download_is_continued_and_trained_from(model: Path, hub: Hub, tmp_path: Path) -> None:
    config, target = configuration(tmp_path, f"models/{NAME}"), tmp_path / "models" / NAME
    read = files_of(model)
    hub.stall = max(file.name for file in model.glob("model-*.safetensors"))
    first = start(config, hub)
    try:
        assert hub.stalled.wait(120)
        while len(hub.sent) < len(read) - 1:
            assert first.poll() is None
            time.sleep(0.05)
        while not (target.parent / f".Tiny-Llama.{COMMIT[:12]}.download" / "config.json").is_file():
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert not target.exists()
    sent = [*hub.sent]
    again = start(config, hub)
    _, messages = again.communicate(timeout=300)
    assert again.returncode == 0, messages
    assert f"Downloading {NAME} (revision main, commit {COMMIT[:12]})" in messages
    files = {file.name for file in target.iterdir()}
    assert files == {*read, ".cache"}
    assert all((target / name).read_bytes() == (model / name).read_bytes() for name in read)
    assert len(hub.sent) < 2 * len(sent)  # what was whole is not sent again
    assert not list(target.parent.glob(".Tiny-Llama*"))
    (run,) = (tmp_path / "runs").iterdir()
    assert RunFolder(run).summary()["finished"] is True


def test_a_folder_that_is_there_needs_no_network(
    model: Path, here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, f"models/{NAME}", {"revision": COMMIT})
    arguments = ["--config", str(config)]
    for command in (["plan"], ["params"], ["data", "prepare"], ["train", "--dry-run"]):
        assert main([*command, *arguments]) == 2
        assert f"`cdrmix train` downloads {NAME} from the Hugging Face hub to it" in error_of(capsys)
    assert main(["validate", *arguments]) == 0
    assert f"`cdrmix train` downloads {NAME} from the Hugging Face hub to it" in error_of(capsys)
    assert here.sent == []
    no_text = ["train", *arguments, f"data.source.paths=[{tmp_path / 'none.jsonl'}]"]  # this ends after the download
    assert main(no_text) == CorpusError.exit_code
    assert sorted(here.sent) == sorted(files_of(model))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(no_text) == CorpusError.exit_code
    assert main(["params", *arguments]) == 0
    assert main(["train", *arguments, "model.revision=other"]) == 2
    assert f"model.revision: other, but {tmp_path / 'models' / NAME} has the revision {COMMIT}" in error_of(capsys)


def gated(status: int) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    def change(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.gated = status

    return change


def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def unreachable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.html = True


def pickled(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.hidden = ".safetensors"


def nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("path", "settings", "change", "message"),
    [
        (
            "models/acme/Missing",
            {},
            nothing,
            "has no model acme/Missing that this machine may read; the last two",
        ),
        (f"models/{NAME}", {}, gated(401), f"{NAME} is gated: ask for access at https://huggingface.co/{NAME}, then"),
        (f"models/{NAME}", {}, gated(403), "then set HF_TOKEN to a token of your account"),
        (
            f"models/{NAME}",
            {"revision": "v9"},
            nothing,
            f"{NAME} has no revision v9 on the Hugging Face hub; set",
        ),
        (f"models/{NAME}", {}, offline, "that HF_HUB_OFFLINE is not set"),
        (f"models/{NAME}", {}, unreachable, f"{NAME} was not downloaded ("),
        (f"models/{NAME}", {}, no_hub, "check that this machine reaches https://huggingface.co (or HF_ENDPOINT)"),
        (
            f"models/{NAME}",
            {},
            pickled,
            f"{NAME} (revision main) on the Hugging Face hub lacks config.json or",
        ),
        ("models/acme/Tiny--Llama", {}, nothing, "acme/Tiny--Llama, are not a name on the Hugging Face hub"),
    ],
)
def test_downloads_that_fail(
    path: str,
    settings: dict[str, Any],
    change: Callable[[Hub, pytest.MonkeyPatch], None],
    message: str,
    here: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(here, monkeypatch)
    assert main(["train", "--config", str(configuration(tmp_path, path, settings))]) == 2
    assert message in error_of(capsys)
    assert not (tmp_path / path).exists()
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_has_its_own_exit_code(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert main(["train", "--config", str(configuration(tmp_path, f"models/{NAME}"))]) == DiskFullError.exit_code
    assert f"the disk is full: the model {NAME} in" in error_of(capsys)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "models"}, "model.path whose last two parts are a name on the hub"),
        ({"path": "/models"}, "model.path whose last two parts are a name on the hub"),
        ({"path": None, "random": {"model_type": "llama"}}, "model.path whose last two parts are a name on the hub"),
        ({"made_by": "base.yaml"}, "false with model.made_by, which makes the folder"),
    ],
)
def test_sections_that_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(configuration(tmp_path, "models/a/b", settings))]) == 2
    error = error_of(capsys)
    assert "model.online: found true" in error
    assert message in error


def test_a_wait_for_another_download_is_told_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durable, "LONGEST_WAIT", 0.01)
    with (tmp_path / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(ConfigError, match=r"another process has had this lock"),
            downloads._locked(tmp_path / "lock"),
        ):
            pass
    assert capsys.readouterr().err.startswith(f"cdrmix: waiting for another process, which has {tmp_path / 'lock'}\n")
