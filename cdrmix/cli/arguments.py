"""What several commands share: types of arguments, common arguments, and what they stand for."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from cdrmix.errors import ConfigError

PRESETS = ("quick", "standard", "full", "production")  # of gates


def positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; found {text!r}")
    return int(text)


def non_negative_integer(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0; found {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and of at most 1; found {text!r}")
    return share


def name_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names with commas between; found {text!r}")
    return names


def length_list(text: str) -> list[int]:
    """1k,4k or 1024,4096."""
    lengths = []
    for part in text.split(","):
        number = part.strip().lower()
        lengths.append(1024 * positive_integer(number[:-1]) if number.endswith("k") else positive_integer(number))
    return lengths


def seed_list(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 2**63 for part in parts):
        raise argparse.ArgumentTypeError(f"must be integers from 0 to 2^63 - 1 with commas between; found {text!r}")
    return [int(part) for part in parts]


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0; found {text!r}")
    return number


def time_with_zone(text: str) -> datetime.datetime:
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"must be a time with a zone, such as 2026-03-01T12:00Z; found {text!r}")
    return time


def add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", required=True, type=Path, metavar="RUN_OR_EXPORT", help="a run, checkpoint or export folder"
    )


def add_checkpoint(sub: argparse.ArgumentParser, default: str) -> None:
    text = f"which of a run's: best (on held-out text), last, or a checkpoint (default: {default})"
    sub.add_argument("--checkpoint", metavar="best|last|PATH", help=text)


def add_device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="device of the model (default: run.device of its configuration)",
    )


def choose_checkpoint(options: argparse.Namespace) -> None:
    """Puts the checkpoint of the option --checkpoint, if it is given, in the place of its run in --model."""
    if options.checkpoint is None:
        return
    from cdrmix.inference.choice import of_run

    found = of_run(options.model, options.checkpoint)
    name = "" if found.path == options.model else f" {found.path.name},"
    print(f"Using{name} {found.reason}", file=sys.stderr, flush=True)
    options.model = found.path


def chosen_device(options: argparse.Namespace) -> str | None:
    """The option --device. Raises ConfigError, which names the option, if this machine has no such device."""
    from cdrmix.runtime import device_type

    device: str | None = options.device
    if device is not None:
        device_type(device, "--device")
    return device


def check_writable(path: Path | None, option: str, ending: str) -> None:
    """Raises ConfigError, which names the option, if the file of an option that writes one cannot be there."""
    if path is not None and (path.suffix != ending or path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{option} {path}: name a file FILE{ending} in a folder that exists")


def write_file(path: Path, option: str, content: bytes | str) -> None:
    """Writes the file of an option. Raises ConfigError, which names the option, if it cannot be written."""
    from cdrmix.durable import write_atomically

    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def show_every_character() -> None:
    """Prints a character that the terminal cannot encode as its code; without this, printing would fail midway."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
