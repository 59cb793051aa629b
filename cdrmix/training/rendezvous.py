"""How the processes of a run meet: their places, the key-value store that they share, and waits that tell for whom.

On one machine the store is a file in the launcher's folder, which its user alone can read: no port is opened, so no
other user of the machine reaches it. Several machines, and processes that another launcher started, meet at
MASTER_ADDR:MASTER_PORT, where the first process listens; what comes from there is data (messages.py), but whoever
reaches that port can end the run (docs/security.md).
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from cdrmix.durable import LONGEST_WAIT, TELL_EVERY, wait_until
from cdrmix.errors import ConfigError, HangError
from cdrmix.training.launch import FOLDER

# Of collectives and of the start. Processes differ by at most the time of one step.
TIMEOUT = datetime.timedelta(minutes=30)
UNKNOWN_NAME_WAIT = 60.0  # seconds; a cluster may know the name of a machine later than the machine is there
STORE = "store"  # file of the launcher's folder
BY_OTHERS = "Unset it to train in one process; --nproc starts several"


class Place(NamedTuple):
    """The place of a process in its run: its rank among `size`, and its rank among the `local_size` of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place:
    """This process's place, from RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment; without them it
    is the only process. Raises ConfigError if they contradict each other."""
    rank, size, local_rank = _number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment: RANK is from 0 to WORLD_SIZE - 1. {BY_OTHERS}"
        )
    local_size = _number("LOCAL_WORLD_SIZE", size)
    if not 0 <= local_rank < max(local_size, 1):
        raise ConfigError(
            f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} in the environment: LOCAL_RANK is from 0 to "
            f"LOCAL_WORLD_SIZE - 1. {BY_OTHERS}"
        )
    if size > 1:
        needed = ("RANK", "LOCAL_RANK") if _in_a_folder() else ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size} in the environment says that this process is one of {size}, but "
                f"{' and '.join(missing)} of a launcher {'is' if len(missing) == 1 else 'are'} missing. {BY_OTHERS}"
            )
    return Place(rank, size, local_rank, local_size)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: a launcher puts a number there. {BY_OTHERS}")
    return int(text)


def _in_a_folder() -> bool:
    return FOLDER in os.environ and "MASTER_ADDR" not in os.environ


@functools.cache
def rendezvous_store(rank: int, size: int) -> dist.Store:
    """The key-value store that all processes share. Returns when all are there.

    Raises ConfigError if the address cannot be used or a process does not come.
    """
    if _in_a_folder():
        store: dist.Store = dist.FileStore(str(Path(os.environ[FOLDER]) / STORE), size)
    else:
        store = _store_of_a_port(rank)
    store = dist.PrefixStore("cdrmix", store)
    store.set(f"machine of {rank}", platform.node())
    keys = [f"machine of {each}" for each in range(size)]
    limit = TIMEOUT.total_seconds()

    def told(seconds: float) -> None:
        tell(seconds, awaited(store, keys, rank, "the start"))

    if not wait_until(lambda: store.check(keys), limit, told):
        raise ConfigError(
            f"{awaited(store, keys, rank)} did not start within {limit / 60:.0f} minutes; start them again"
        )
    return store


def _store_of_a_port(rank: int) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    where = f"{host}:{port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} in the environment: a port is from 1 to {(1 << 16) - 1}. {BY_OTHERS}")
    _check_name(host)
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun listens
    end, begun = time.monotonic() + TIMEOUT.total_seconds(), time.monotonic()
    while True:
        try:
            pause = datetime.timedelta(seconds=min(TELL_EVERY, max(1.0, end - time.monotonic())))
            store = dist.TCPStore(host, port, is_master=listens, timeout=pause, wait_for_workers=False)
        except dist.DistNetworkError as error:
            if listens:
                raise ConfigError(
                    f"{where}: the processes of the run should meet there, but this machine cannot listen on the port; "
                    "another program may use it: choose another port, or wait until that program ends"
                ) from error
            if time.monotonic() > end:
                raise ConfigError(
                    f"{where}: nobody listened there for {TIMEOUT.total_seconds() / 60:.0f} minutes; start the first "
                    "machine, and check that this one reaches that port"
                ) from error
            tell(time.monotonic() - begun, f"process 0, which should listen on {where}")
            continue
        store.set_timeout(TIMEOUT)
        return store


def _check_name(host: str) -> None:
    def known() -> bool:
        try:
            return bool(socket.getaddrinfo(host, None))
        except (socket.gaierror, UnicodeError):
            return False

    if not wait_until(known, UNKNOWN_NAME_WAIT, lambda seconds: tell(seconds, f"the name service to know {host!r}")):
        raise ConfigError(f"{host!r}: no machine of this name is known; the processes of the run should meet there")


def tell(seconds: float, what: str) -> None:
    """Writes for what this process waits, and how long so far; nothing if it is ""."""
    if what:
        print(f"cdrmix: waiting for {what}; {seconds:.0f} s so far", file=sys.stderr, flush=True)


def wait_for_all(store: dist.Store, keys: Sequence[str], rank: int, what: str) -> None:
    """Waits until every process has set its key. what: what they do then, for the lines and the error.

    Raises HangError after LONGEST_WAIT.
    """

    def told(seconds: float) -> None:
        tell(seconds, awaited(store, keys, rank, what))

    if not wait_until(lambda: store.check(list(keys)), LONGEST_WAIT, told):
        raise HangError(f"{awaited(store, keys, rank)} did not come to {what} within {LONGEST_WAIT / 3600:.0f} hours")


def awaited(store: dist.Store, keys: Sequence[str], rank: int, what: str = "") -> str:
    """The processes whose key is missing, with their machines; key n is of process n.

    With `what` only the first of those that wait says it, so that a thousand processes write one line; "" in others.
    """
    missing = [number for number, key in enumerate(keys) if not store.check([key])]
    if what and rank != min(set(range(len(keys))) - set(missing), default=rank):
        return ""
    shown = [f"{number}{_machine(store, number)}" for number in missing[:8]]
    more = f" and {len(missing) - 8} others" if len(missing) > 8 else ""
    return f"process{'es' if len(missing) > 1 else ''} {', '.join(shown)}{more}" + (f" at {what}" if what else "")


def _machine(store: dist.Store, rank: int) -> str:
    key = f"machine of {rank}"
    return f" on {store.get(key).decode('utf-8', 'replace')}" if store.check([key]) else ""
