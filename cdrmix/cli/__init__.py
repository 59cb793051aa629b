"""The command line: parses the arguments, runs a command, and turns errors into exit codes.

A command is a module: it adds its arguments, and runs. It imports the packages that it needs while it runs, so that
`cdrmix --help` does not import PyTorch.

A CdrmixError is an error that the user can correct: its message goes to standard error and its exit code to the shell.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from cdrmix.cli import (
    ablate,
    checkpoints,
    compare,
    config,
    data,
    doctor,
    eval_watch,
    evaluate,
    evidence,
    export,
    gate,
    generate,
    import_,
    ladder,
    params,
    plan,
    reason,
    report,
    train,
    validate,
)
from cdrmix.cli.commands import OVERRIDES, Commands
from cdrmix.data.escaping import escape_unprintable
from cdrmix.errors import INTERRUPTED, UNEXPECTED, CdrmixError, CdrmixWarning, ConfigError, DiskFullError, Preempted
from cdrmix.training import launch

BROKEN_PIPE = 141  # 128 + SIGPIPE
# The user named a path that cannot be used: --out, --model, a run folder.
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
COMMANDS = (
    *(train, data, validate, config, doctor, plan, params, evaluate, eval_watch, generate, export, import_, reason),
    *(ablate, ladder, checkpoints, gate, evidence, compare, report),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, or the exit code of a CdrmixError.

    Raises SystemExit with 70 for an unexpected error, after printing its traceback. The code is not 1, because 1 is an
    answer of `compare`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _printer(warnings.showwarning)
            return _run(arguments)
    except Exception as error:
        message = "cdrmix: error: unexpected error (a defect of cdrmix); the traceback is above"
        raise SystemExit(_fail(UNEXPECTED, message, show_traceback=True)) from error
    finally:
        if launch.is_worker():
            launch.end_work()


def _printer(others: Callable[..., None]) -> Callable[..., None]:
    """Prints a CdrmixWarning as one line, without the line of code that issued it; other warnings by `others`."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CdrmixWarning):
            print(f"cdrmix: warning: {message}", file=sys.stderr)
        else:
            others(message, category, filename, lineno, file, line)

    return show


def _run(arguments: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(joined(arguments))
    show_traceback = options.traceback or "--traceback" in rest
    try:
        if launch.is_worker():
            launch.begin_work()
        if (gone := _working_folder_gone()) is not None:  # libraries end the process then
            raise gone
        options.overrides = _overrides(options, [word for word in rest if word != "--traceback"])
        return options.command(options)
    except CdrmixError as error:
        return _fail(error.exit_code, f"cdrmix: error: {error}", show_traceback, agreed=isinstance(error, Preempted))
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "cdrmix: interrupted", show_traceback, agreed=True)
    except BrokenPipeError:
        # The reader of the output (head, less) has exited. Without this, Python fails again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if (cause := _cause(error)) is None:
            raise
        return _fail(cause.exit_code, f"cdrmix: error: {cause}", show_traceback)
    except ModuleNotFoundError as error:
        package = (error.name or "cdrmix").partition(".")[0]
        if package == "cdrmix" or package in sys.stdlib_module_names or _is_installed(package):
            raise
        message = (
            f"cdrmix: error: the package {package}, which this command needs, is not installed for {sys.executable}: "
            "install cdrmix again with its dependencies, or the package by pip"
        )
        return _fail(ConfigError.exit_code, message, show_traceback)
    except RuntimeError as error:
        if not launch.lost_peer(error):
            raise
        return _fail(CdrmixError.exit_code, launch.CRASHED, show_traceback)


def _cause(error: OSError) -> CdrmixError | None:
    """What the user can do about an error of the system; None: it is no error of the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return DiskFullError(f"the disk is full{where}; free some space and run again")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ConfigError(f"this process may have {most} open files, which are too few; allow more: `ulimit -n 4096`")
    if (gone := _working_folder_gone()) is not None:
        return gone
    if error.errno == errno.ENOENT and error.filename:
        return ConfigError(f"{error.filename} is not there; it was removed, or its folder, while the command worked")
    if error.errno in UNUSABLE and error.filename:
        return ConfigError(f"cannot use {error.filename}: {error.strerror}")
    return None


def _working_folder_gone() -> ConfigError | None:
    try:
        os.getcwd()
    except FileNotFoundError:
        return ConfigError("the working folder of this process was removed; change to one that exists")
    return None


def _fail(status: int, message: str, show_traceback: bool, *, agreed: bool = False) -> int:
    """Reports an error. `agreed`: every process of the run fails in the same way, so the launcher need not stop any."""
    if show_traceback:
        message = traceback.format_exc() + message
    if launch.is_worker():
        launch.report_failure(status, message)
        return 0 if agreed else status
    print(escape_unprintable(message), file=sys.stderr)
    return status


def _is_installed(package: str) -> bool:
    # An imported module may have no spec, for which find_spec raises.
    return sys.modules.get(package) is not None or (
        package not in sys.modules and importlib.util.find_spec(package) is not None
    )


def _overrides(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(options, "config"):
            raise ConfigError(
                f"unknown argument {word!r}; `cdrmix {options.name} --help` lists the arguments"
                + (f". {OVERRIDES}" if hasattr(options, "config") else "")
            )
    return list(rest)


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with `eval watch` as one word: a subparser of `eval` would refuse the overrides of `eval`."""
    place = next((place for place, word in enumerate(arguments) if not word.startswith("-")), 0)
    if list(arguments[place : place + 2]) != ["eval", "watch"]:
        return list(arguments)
    return [*arguments[:place], "eval watch", *arguments[place + 2 :]]


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each command sets `command`: a function from the parsed options to an exit code."""
    top = argparse.ArgumentParser(
        prog="cdrmix",
        description="Train hybrid mixture-of-experts language models, from raw text to an exported model.",
        allow_abbrev=False,
    )
    top.add_argument("--traceback", action="store_true", help="print the Python traceback of an error")
    commands = Commands(top)
    for module in COMMANDS:
        module.add(commands)
    return top
