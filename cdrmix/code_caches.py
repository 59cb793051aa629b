"""The folders in which compiled code is kept between processes: only their user may write there.

Whoever can write into such a folder runs code as the user. torch.compile would keep its code in a folder of the
temporary folder whose name everyone can guess, and another user of the machine can make that folder first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from cdrmix.errors import ConfigError

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
VARIABLES = (INDUCTOR, "TRITON_CACHE_DIR", "TRITON_HOME", "NUMBA_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def check_code_caches() -> None:
    """Checks the folders that the environment names. Raises ConfigError if another user can write into one."""
    for name in VARIABLES:
        if folder := os.environ.get(name):
            _check(Path(folder), name)


def keep_code_of_torch_compile() -> None:
    """Names a folder of the user for torch.compile, unless the environment names one. Raises ConfigError as above."""
    if not os.environ.get(INDUCTOR):
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ[INDUCTOR] = str(Path(caches, "cdrmix", "torch-compile"))
    _check(Path(os.environ[INDUCTOR]), INDUCTOR)


def _check(folder: Path, name: str) -> None:
    kept = f"{name}={folder}: code that was compiled is kept there and run later"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"{kept}, and it is no folder that can be used: {error.strerror}; name another") from error
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{kept}, and other users of this machine can write there; name a folder of your own, or "
            f"take their right away: chmod go-w {folder}"
        )
    # Not the temporary folder: containers with a single user may have it open to all, and libraries keep code there.
    temporary = Path(tempfile.gettempdir())
    parents = {*folder.absolute().parents, *folder.resolve().parents} - {temporary, temporary.resolve()}
    for parent in parents:
        if _others_can_rename_in(parent):
            raise ConfigError(
                f"{kept}, and other users of this machine can replace it, because they can write to {parent}; name "
                f"another folder, or take their right away: chmod o-w {parent}"
            )


def _others_can_rename_in(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX  # in /tmp, with this bit, only what is their own
