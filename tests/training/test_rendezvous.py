"""How processes meet: what the environment may say, who is awaited, and messages that a stranger has written."""

from __future__ import annotations

import base64
import datetime
import math
import os
import pickle
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cdrmix import code_caches, durable, errors
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError, HangError
from cdrmix.training import distributed, launch, messages, rendezvous
from cdrmix.training.distributed import DistributedContext

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch.OF_A_LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in PLACE.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .* RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT .* are missing"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1 in the environment: RANK is from 0 to WORLD_SIZE - 1"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' in the environment: a launcher puts a number there"),
        ({"WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"LOCAL_RANK": "2²"}, "LOCAL_RANK='2²'"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 and LOCAL_WORLD_SIZE=1"),
        (without("RANK"), "RANK of a launcher is missing"),
        (without("LOCAL_RANK"), "LOCAL_RANK of a launcher is missing"),
        (without("MASTER_PORT"), "MASTER_PORT of a launcher is missing"),
        (PLACE | {"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE=''"),
    ],
)
def test_places_that_another_launcher_left_are_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: str
) -> None:
    """They ended in a traceback, or in half an hour of silence."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told) as caught:
        rendezvous.place()
    assert "Unset it to train in one process; --nproc starts several" in str(caught.value)


def test_a_process_alone_and_one_of_a_launcher_have_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rendezvous.place() == (0, 1, 0, 1)
    places = launch.Nodes(2, 1, "machine0", 29500).places(3)
    for name, value in places[2].items():
        monkeypatch.setenv(name, value)
    assert rendezvous.place() == (5, 6, 2, 3)
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv(launch.FOLDER, str(tmp_path))
    assert rendezvous.place() == (5, 6, 2, 3)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a fraction of a second."""
    monkeypatch.setattr(rendezvous, "TIMEOUT", datetime.timedelta(seconds=0.3))
    monkeypatch.setattr(rendezvous, "LONGEST_WAIT", 0.3)
    monkeypatch.setattr(rendezvous, "UNKNOWN_NAME_WAIT", 0.05)
    for module in (rendezvous, durable):
        monkeypatch.setattr(module, "TELL_EVERY", 0.1)


def meet(rank: int, size: int) -> dist.Store:
    return rendezvous.rendezvous_store.__wrapped__(rank, size)  # not kept for other tests


def test_who_does_not_come_is_named_while_and_after_it_is_awaited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(launch.FOLDER, str(tmp_path))
    with pytest.raises(ConfigError, match=r"^processes 1, 2 did not start within 0 minutes"):
        meet(0, 3)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert set(lines) == {"cdrmix: waiting for processes 1, 2 at the start; 0 s so far"}


def test_a_message_that_does_not_come_ends_the_wait(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    store.set("machine of 2", "node7")
    keys = [f"item {rank}" for rank in range(3)]
    store.set(keys[0], "")
    store.set(keys[1], "")
    with pytest.raises(HangError, match=r"^process 2 on node7 did not come to the choice within 0 hours"):
        rendezvous.wait_for_all(store, keys, 0, "the choice")
    assert "cdrmix: waiting for process 2 on node7 at the choice; 0 s so far\n" in capsys.readouterr().err
    with pytest.raises(HangError):
        rendezvous.wait_for_all(store, keys, 1, "the choice")
    assert capsys.readouterr().err == "", "one of those that wait says it"


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield int(other.getsockname()[1])


@pytest.mark.parametrize(
    ("rank", "host", "told"),
    [
        (0, "127.0.0.1", "^127.0.0.1:{port}: .* cannot listen on the port"),
        (0, "no-such-machine.invalid", "^'no-such-machine.invalid': no machine of this name is known"),
        (1, "a" * 70, "no machine of this name is known"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, short: None, used_port: int, rank: int, host: str, told: str
) -> None:
    for name, value in (PLACE | {"MASTER_ADDR": host, "MASTER_PORT": str(used_port)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told.format(port=used_port)):
        meet(rank, 2)


def test_a_first_machine_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in (PLACE | {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^127.0.0.1:{port}: nobody listened there"):
        meet(1, 2)


def test_the_processes_of_one_machine_open_no_port_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet in a file that their user alone can read, and exchange tensors over the loopback interface."""
    seen: list[dict[str, str]] = []

    class Worker:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str], start_new_session: bool) -> None:
            folder = Path(env[launch.FOLDER])
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert command[1:3] == ["-m", "cdrmix.cli"]
            seen.append(env)

        def poll(self) -> int:
            return 0

        def kill(self) -> None: ...

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(launch.subprocess, "Popen", Worker)
    monkeypatch.setenv("MASTER_ADDR", "left.by.another")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert launch.launch(2, ["train"]) == (0, "")
    assert [env["RANK"] for env in seen] == ["0", "1"]
    for env in seen:
        assert "MASTER_ADDR" not in env
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == launch.loopback()


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
items = st.recursive(
    plain | st.builds(Path, st.text("ab/.", min_size=1)),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(items)
def test_messages_arrive_as_they_were_said(item: object) -> None:
    arrived = messages.decode(messages.encode(item))
    assert arrived == item
    assert type(arrived) is type(item)


def test_tensors_and_errors_arrive_as_they_were_said() -> None:
    tensor = torch.tensor([[1.5, math.nan], [math.inf, -0.0]], dtype=torch.float64)
    arrived, dtype, error = messages.decode(messages.encode((tensor, torch.bfloat16, CheckpointError("no file"))))
    assert arrived.dtype == torch.float64
    assert arrived.numpy().tobytes() == tensor.numpy().tobytes()
    assert dtype == torch.bfloat16
    assert (type(error), str(error)) == (CheckpointError, "no file")
    with pytest.raises(TypeError, match="processes cannot tell each other a set"):
        messages.encode({1})
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, CdrmixError):
            assert type(messages.decode(messages.encode(kind(name)))) is kind


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (self.path,)


def array(shape: int, kind: str = "<f8") -> bytes:
    """The header of an array of NumPy, without its values."""
    return (
        b"\x93NUMPY\x01\x00v\x00"
        + f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape},), }}".encode().ljust(118)
    )


def tensor(content: bytes) -> bytes:
    return b'["tensor", "' + base64.b64encode(content) + b'"]'


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b'["path", 3]',
    b'["error", ["CdrmixError", "x", "y"]]',
    b'["error", ["annotations", "x"]]',
    b'["error", ["CdrmixWarning", "x"]]',
    b'["error", ["__builtins__", "x"]]',
    b'["tensor", "AAAA"]',
    b'["tensor", "%"]',
    *(tensor(array(shape)) for shape in (3, -1, 10**15, 10**30)),
    b'["dict", [[["list", []], ["plain", 1]]]]',
    b'["plain", [1]]',
    b'{"plain": 1}',
    b"3",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it is no message of this package: "):
        messages.decode(text)


def test_what_a_stranger_writes_into_the_store_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every process left pickled objects there, so whoever reached the store ran code as the user of the run."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "rendezvous_store", lambda rank, size: store)
    harm = tmp_path / "harm"
    assert pickle.loads(pickle.dumps(Harmful(tmp_path / "it works"))) is None
    assert (tmp_path / "it works").exists()

    said = (pickle.dumps(Harmful(harm)), tensor(array(1, "|O") + pickle.dumps(Harmful(harm))))
    for turn, text in enumerate(said, 1):
        store.set(f"item {turn} of 1", text.decode("latin-1"))
        world = DistributedContext(0, 2, 0, torch.device("cpu"))
        thread = threading.Thread(target=lambda turn=turn: store.set(f"reader {turn} is 1", ""))
        thread.start()
        with pytest.raises(CdrmixError, match="process 1 said of the choice what cannot be read"):
            world.gather(None, "the choice")
        thread.join()
    assert not harm.exists()


CONNECTING = """
import sys, torch, torch.distributed as dist
from cdrmix.errors import CdrmixError
from cdrmix.training import distributed
store = dist.HashStore()
for key in ("0//cpu//0/1", "0//1//cpu//0/1"):
    store.set(key, sys.argv[1])
distributed.rendezvous_store = lambda rank, size: store
try:
    distributed._join_process_group(0, 2, 0, torch.device("cpu"))
except CdrmixError as error:
    print(error)
"""


@pytest.mark.parametrize("written", ["\x7f" * 64, "0", "x"], ids=["a length", "a digit", "a letter"])
def test_addresses_that_a_stranger_wrote_end_in_a_message(written: str) -> None:
    """gloo took a length from them, and the process ended in a traceback because there is not so much memory."""
    code, output = forked.run(["-c", CONNECTING, written])
    assert code == 0, output
    assert "process 0 could not connect to the others by the addresses in the store" in output


@pytest.fixture
def no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no folder of compiled code."""
    for name in code_caches.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize("name", code_caches.VARIABLES)
def test_code_is_kept_only_where_its_user_alone_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Found by its name in the temporary folder, torch.compile's cache could be another user's."""
    monkeypatch.setenv(name, str(tmp_path / "of the user"))
    code_caches.check_code_caches()
    code_caches.check_code_caches()
    for mode in (0o777, 0o770, 0o1777):
        shared = tmp_path / f"shared {mode}"
        shared.mkdir()
        shared.chmod(mode)
        monkeypatch.setenv(name, str(shared))
        with pytest.raises(ConfigError, match=f"{name}={shared}: code that was compiled is kept there"):
            code_caches.check_code_caches()


@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize("name", code_caches.VARIABLES)
def test_code_is_not_kept_where_others_can_replace_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "mine" / "kept").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "mine" / "kept")
    for folder in ("open/mine", "open/new", "open/link"):
        monkeypatch.setenv(name, str(tmp_path / folder))
        with pytest.raises(ConfigError, match=f"{name}=.* can replace it, because they can write to {tmp_path}/open;"):
            code_caches.check_code_caches()
    (tmp_path / "open").chmod(0o1777)  # as /tmp has it
    code_caches.check_code_caches()
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"no folder that can be used: File exists; name another"):
        code_caches.check_code_caches()


def test_torch_compile_keeps_its_code_in_the_user_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(code_caches.INDUCTOR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(code_caches.INDUCTOR, "")
    code_caches.keep_code_of_torch_compile()
    folder = Path(os.environ[code_caches.INDUCTOR])
    assert folder.is_relative_to(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        code_caches.keep_code_of_torch_compile()
