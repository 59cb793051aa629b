"""The command line: parses the arguments, calls a function of commands.py, and turns errors into exit codes.

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
from pathlib import Path
from typing import TextIO

from cdrmix import cli_checkpoints, cli_eval, cli_ladder, commands
from cdrmix.cli_common import (
    add_checkpoint,
    add_device,
    add_model,
    length_list,
    name_list,
    non_negative_integer,
    positive_integer,
    seed_list,
)
from cdrmix.cli_gates import add_gate
from cdrmix.data.escaping import escape_unprintable
from cdrmix.errors import INTERRUPTED, UNEXPECTED, CdrmixError, CdrmixWarning, ConfigError, DiskFullError, Preempted
from cdrmix.gpus import GPUS
from cdrmix.training import launch

BROKEN_PIPE = 141  # 128 + SIGPIPE
# The user named a path that cannot be used: --out, --model, a run folder.
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
OVERRIDES = "Arguments of the form key.path=value override keys of the file. Example: train.steps=100"

GUTTER = (
    "Each line of text has a prefix: the loss weight if it is not 1, then | for a new line, : for the continuation "
    "of a long line, > for a special token. Control characters are printed as <U+001B>."
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
    subparsers = top.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(name: str, command: object, text: str, *, config: bool | None = None) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
            name, help=text, description=text, allow_abbrev=False, epilog=OVERRIDES if config is not None else None
        )
        sub.set_defaults(command=command)
        if config is not None:
            sub.add_argument("--config", required=config, type=Path, metavar="YAML", help="the configuration file")
        return sub

    train = add(
        "train", commands.train, "run everything: prepare the text, train, evaluate, export, report", config=False
    )
    train.add_argument(
        "--nproc", type=positive_integer, default=1, metavar="N", help="number of processes on this machine"
    )
    text = "start the processes again up to N times after one crashed, was killed, hung or ran out of memory"
    train.add_argument("--max-restarts", type=non_negative_integer, default=0, metavar="N", help=text)
    text = "number of machines; the command is started on each of them, with the same --nproc (default 1)"
    train.add_argument("--nnodes", type=positive_integer, default=1, metavar="N", help=text)
    train.add_argument("--node-rank", type=int, metavar="R", help="the number of this machine, from 0")
    text = "where the processes of all machines meet: a name of machine 0 and a free port of it"
    train.add_argument("--rendezvous", metavar="HOST:PORT", help=text)
    train.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue a run: auto is the newest unfinished run of this configuration; with a path, --config is by "
        "default the configuration of that run",
    )
    text = "with --resume RUN: continue it with this value, such as train.steps=2000; may be repeated"
    train.add_argument("--extend", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = (
        "print the plan of the run on this machine and stop; exit code 2 if it does not fit, 3 if the text is missing"
    )
    train.add_argument("--dry-run", action="store_true", help=text)
    _add_data(subparsers)
    add("validate", commands.validate, "check a configuration and print the value of every key", config=True)
    text = "print every key of a configuration file, or one key or section: type, default, meaning"
    add("config", commands.config, text).add_argument(
        "key", nargs="?", metavar="KEY", help="a key or a section, for example train.zero_stage or data (default: all)"
    )
    text = "check this machine: packages, kernels, engine, repeatability, disk; exit code 1 if a check fails"
    doctor = add("doctor", commands.doctor, text)
    text = "check the modes of N processes too: 2, 4 or 8"
    doctor.add_argument("--nproc", type=positive_integer, default=1, metavar="N", help=text)
    doctor.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device (default: auto)")
    text = "folder of the disk to measure (default: experiments)"
    doctor.add_argument("--folder", type=Path, default=Path("experiments"), metavar="FOLDER", help=text)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    text = "estimate memory, operations, time and disk of a training; if it does not fit, suggest settings that do"
    plan = add("plan", commands.plan, text, config=True)
    plan.add_argument(
        "--gpu",
        choices=[*(gpu.key for gpu in GPUS), "cpu"],
        help="plan for this device (default: the device that run.device selects on this machine)",
    )
    plan.add_argument(
        "--gpus", type=positive_integer, default=1, metavar="N", help="number of devices, one process each (default 1)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table; unknown values are null")
    add("params", commands.params, "count stored and active parameters without building the model", config=True)

    text = (
        "measure bits per byte on held-out text, and compare with unigram, gzip, zstd; with --tasks: measure the share "
        "of right answers to generated questions, by length; with --harness: run tasks of lm-eval; with --suite: "
        "run suites, such as code, choices, long, leak, latency"
    )
    cli_eval.add_eval_options(add("eval", cli_eval.eval, text, config=False))
    text = "measure suites on the checkpoints of a run while it is trained, in processes of low priority"
    cli_eval.add_watch_options(add("eval watch", cli_eval.eval_watch, text))
    text = "continue a prompt and print the text while it is generated"
    _generate_options(add("generate", commands.generate, text))
    text = "write the model of a run to a read-only folder with checksums"
    _export_options(add("export", commands.export, text))
    text = "make a model of a file of public RWKV-7 weights: a read-only folder, as of export, for every --model"
    _import_options(add("import", commands.import_model, text))
    _add_reason(subparsers)
    text = "train small models with a mechanism on and off, and print a comparison; of a folder, for each of its files"
    ablate = add("ablate", commands.ablate, text, config=True)
    ablate.add_argument("--seeds", type=seed_list, metavar="1,2,3", help="seeds to run (default: those of the file)")
    ablate.add_argument("--arms", type=name_list, metavar="A,B", help="arms to run (default: all)")
    ablate.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the results (default: experiments/ablations)"
    )
    cli_ladder.add_ladder(subparsers)
    cli_checkpoints.add_checkpoints(subparsers)
    add_gate(subparsers)
    compare = add(
        "compare",
        commands.compare,
        "compare the final weights of two runs bit for bit; exit code 0 if identical, 1 if not",
    )
    compare.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run, checkpoint or export folder")
    report = add("report", commands.report, "write loss.png, load.png and report.html of a run again")
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    return top


def _generate_options(generate: argparse.ArgumentParser) -> None:
    add_model(generate)
    add_checkpoint(generate, "last")
    add_device(generate)
    text = "text to continue (default: empty, which begins a new document); may be repeated"
    generate.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "continue each prompt N times, in batches, with the seeds SEED, SEED + 1, ... (default 1)"
    generate.add_argument("--samples", type=positive_integer, default=1, metavar="N", help=text)
    generate.add_argument("--json", action="store_true", help="print a line of JSON for each text: prompt, seed, text")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 takes the most likely token (default 0.8)",
    )
    generate.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="keep the most likely tokens up to this total probability (default 0.95)",
    )
    generate.add_argument(
        "--top-k", type=int, default=0, help="keep only the K most likely tokens; 0 keeps all (default 0)"
    )
    generate.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default 1)")
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens below this share of the most likely one (default 0)"
    )
    text = "a value above 1 makes tokens of the text so far less likely (default 1)"
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help=text)
    text = "end before this text; may be repeated"
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = "end after N tokens (default 256)"
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help=text)
    text = "draft tokens with the further depths of the model (model.prediction); the text is the same"
    generate.add_argument("--speculative", action="store_true", help=text)


def _export_options(export: argparse.ArgumentParser) -> None:
    add_model(export)
    add_checkpoint(export, "the run's export.checkpoint")
    where = export.add_mutually_exclusive_group()
    text = "folder to create (default: export/ in the run folder; a finished run has it already)"
    where.add_argument("--out", type=Path, metavar="PATH", help=text)
    where.add_argument(
        "--rwkv", type=Path, metavar="OUT.pth", help="write a pure RWKV-7 model for the rwkv package instead"
    )
    form = export.add_mutually_exclusive_group()
    text = "of a model with adapters: the base with the adapters merged into it (default: the run's export.lora)"
    form.add_argument("--merge", action="store_const", const="merge", dest="lora", help=text)
    text = "of a model with adapters: the adapters alone, as peft reads them"
    form.add_argument("--adapter", action="store_const", const="adapter", dest="lora", help=text)


def _import_options(import_: argparse.ArgumentParser) -> None:
    text = "a .pth file, such as RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth, or .safetensors with its names"
    import_.add_argument("weights", type=Path, metavar="WEIGHTS", help=text)
    text = "the tokenizer of the model: a vocabulary (rwkv_vocab_v20230424.txt), a tokenizer.json or its folder"
    import_.add_argument("--tokenizer", required=True, type=Path, metavar="FILE", help=text)
    import_.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to create")


def _add_data(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`data` has commands of its own."""
    text = "prepare text without training, and inspect prepared text"
    data = subparsers.add_parser("data", help=text, description=text, allow_abbrev=False)
    actions = data.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "clean, deduplicate, tokenise and pack the text into shards, which later runs reuse; print their folder"
    prepare = actions.add_parser("prepare", help=text, description=text, allow_abbrev=False, epilog=OVERRIDES)
    prepare.set_defaults(command=commands.data_prepare, name="data prepare")
    prepare.add_argument("--config", required=True, type=Path, metavar="YAML", help="the configuration file")
    text = "print statistics of prepared shards, and decoded rows with their documents"
    inspect = actions.add_parser("inspect", help=text, description=text, allow_abbrev=False, epilog=GUTTER)
    inspect.set_defaults(command=commands.data_inspect, name="data inspect")
    inspect.add_argument("shards", type=Path, metavar="SHARDS", help="the folder that `cdrmix data prepare` prints")
    inspect.add_argument("--split", choices=["train", "valid"], default="train", help="which split (default: train)")
    inspect.add_argument("--row", type=int, metavar="N", help="first row to print, counted from 0 (default 0)")
    inspect.add_argument(
        "--rows", type=positive_integer, default=1, metavar="N", help="number of rows to print (default 1)"
    )
    inspect.add_argument("--domain", metavar="NAME", help="print only rows of this domain")


def _add_reason(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`reason` has commands of its own."""
    text = "use a model that was trained in stage B"
    reason = subparsers.add_parser("reason", help=text, description=text, allow_abbrev=False)
    actions = reason.add_subparsers(dest="action", required=True, metavar="COMMAND")
    demo, evaluate = (
        actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in (
            ("demo", "read a document chunk by chunk, show what the model stores, answer a question about it"),
            ("eval", "ask a model about documents of several lengths, with each mechanism on and off"),
        )
    )
    demo.set_defaults(command=commands.reason_demo, name="reason demo")
    evaluate.set_defaults(command=commands.reason_eval, name="reason eval")
    for command in (demo, evaluate):
        add_model(command)
        add_checkpoint(command, "last")
        add_device(command)
    demo.add_argument(
        "--document", type=Path, metavar="FILE", help="UTF-8 text (default: a generated document of facts)"
    )
    demo.add_argument("--question", metavar="TEXT", help="question about --document or about --memory")
    demo.add_argument(
        "--chunks",
        type=positive_integer,
        default=8,
        metavar="N",
        help="approximate length of the generated document (default 8)",
    )
    demo.add_argument(
        "--number", type=positive_integer, default=1, metavar="N", help="number of the generated document (default 1)"
    )
    demo.add_argument(
        "--session", type=Path, metavar="FILE", help="continue from this file if it exists, and save to it"
    )
    text = "keep committed chunks in a durable index in this folder; answer from all that was read into it"
    demo.add_argument("--memory", type=Path, metavar="FOLDER", help=text)
    text = (
        "generated tasks by name, family or last part of the name (qa1, niah, recall), or your own questions as "
        "jsonl:FILE (default: those that the memory agent, or without one the fast weights, were trained on)"
    )
    evaluate.add_argument("--tasks", "--task", type=name_list, metavar="A,B", help=text)
    text = "tokens of a generated document (default 1k,4k; 1k is 1024)"
    evaluate.add_argument("--lengths", type=length_list, default=[1024, 4096], metavar="1k,4k", help=text)
    text = (
        "what to answer from: memory, last chunk, fast weights, no writes, carried states, whole text (default: all "
        "that the model has; the time of whole text grows with the square of the length where the model has attention)"
    )
    evaluate.add_argument("--mechanisms", type=name_list, metavar="A,B", help=text)
    text = "questions of each task and length (default 50)"
    evaluate.add_argument("--count", type=positive_integer, default=50, metavar="N", help=text)
    evaluate.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the documents (default 1)")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")


if __name__ == "__main__":
    if launch.is_worker():
        launch.exit_worker(main())
    sys.exit(main())
