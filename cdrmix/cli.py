"""The command line: parses the arguments, calls a function of commands.py, and turns errors into exit codes.

A CdrmixError is an error that the user can correct: its message goes to standard error and its exit code to the shell.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from cdrmix import cli_checkpoints, cli_ladder, commands
from cdrmix.cli_gates import add_gate
from cdrmix.data.escaping import escape_unprintable
from cdrmix.errors import CdrmixError, CdrmixWarning, ConfigError, DiskFullError, Preempted
from cdrmix.gpus import GPUS
from cdrmix.training import launch

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE
UNEXPECTED = 70  # sysexits.h EX_SOFTWARE: a defect of cdrmix, not a mistake of the user
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" while writing {error.filename}" if error.filename else ""
            return _fail(
                DiskFullError.exit_code,
                f"cdrmix: error: the disk is full{where}; free some space and run again",
                show_traceback,
            )
        if error.errno not in UNUSABLE or not error.filename:
            raise
        message = f"cdrmix: error: cannot use {error.filename}: {error.strerror}"
        return _fail(ConfigError.exit_code, message, show_traceback)


def train_main() -> int:
    """`cdrmix-train ...` is `cdrmix train ...`."""
    return main(["train", *sys.argv[1:]])


def _fail(status: int, message: str, show_traceback: bool, *, agreed: bool = False) -> int:
    """Reports an error. `agreed`: every process of the run fails in the same way, so torchrun need not stop any."""
    if show_traceback:
        message = traceback.format_exc() + message
    if launch.is_worker():
        launch.report_failure(status, message)
        return 0 if agreed else status
    print(escape_unprintable(message), file=sys.stderr)
    return status


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
        "train", commands.train, "run everything: prepare the text, train, evaluate, export, report", config=True
    )
    train.add_argument("--nproc", type=_positive, default=1, metavar="N", help="number of processes on this machine")
    train.add_argument(
        "--resume", metavar="auto|PATH", help="continue a run: auto is the newest unfinished run of this configuration"
    )
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
    text = "estimate memory, operations, time and disk of a training; if it does not fit, suggest settings that do"
    plan = add("plan", commands.plan, text, config=True)
    plan.add_argument(
        "--gpu",
        choices=[*(gpu.key for gpu in GPUS), "cpu"],
        help="plan for this device (default: the device that run.device selects on this machine)",
    )
    plan.add_argument(
        "--gpus", type=_positive, default=1, metavar="N", help="number of devices, one process each (default 1)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table; unknown values are null")
    add("params", commands.params, "count stored and active parameters without building the model", config=True)

    text = (
        "measure bits per byte on held-out text, and compare with unigram, gzip, zstd; with --tasks: measure the share "
        "of right answers to generated questions, by length; with --harness: run tasks of lm-eval; with --suite: "
        "run suites, such as code, choices, long, leak, latency"
    )
    _eval_options(add("eval", commands.eval, text, config=False))
    text = "measure suites on the checkpoints of a run while it is trained, in processes of low priority"
    watch = add("eval watch", commands.eval_watch, text)
    watch.set_defaults(config=None)  # takes overrides
    watch.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    text = "suites, such as code (default: evaluation.suites of the run); evaluation.samples=5 sets another key"
    watch.add_argument("--suite", type=_names, metavar="A,B", help=text)
    watch.add_argument("--once", action="store_true", help="evaluate the newest checkpoint that is there, and end")
    watch.add_argument("--parent", type=_positive, help=argparse.SUPPRESS)  # the training that started it
    text = "continue a prompt and print the text while it is generated"
    _generate_options(add("generate", commands.generate, text))
    text = "write the model of a run to a read-only folder with checksums"
    _export_options(add("export", commands.export, text))
    _add_reason(subparsers)
    ablate = add(
        "ablate", commands.ablate, "train small models with a mechanism on and off, and print a comparison", config=True
    )
    ablate.add_argument("--seeds", type=_seeds, metavar="1,2,3", help="seeds to run (default: those of the file)")
    ablate.add_argument("--arms", type=_names, metavar="A,B", help="arms to run (default: all)")
    ablate.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the results (default: experiments/ablations)"
    )
    _add_ladder(subparsers)
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


def _eval_options(evaluate: argparse.ArgumentParser) -> None:
    _model(evaluate)
    _checkpoint(evaluate, "last")
    _device(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    text = "tasks or families of tasks, such as recall,ruler,mqar,babilong; all: every one"
    evaluate.add_argument("--tasks", type=_names, metavar="A,B", help=text)
    default = ",".join(f"{length // 1024}k" for length in commands.LENGTHS)
    text = f"tokens of a question with its answer (default {default}; 1k is 1024); may be beyond the training length"
    evaluate.add_argument("--lengths", type=_lengths, metavar="1k,4k", help=text)
    evaluate.add_argument(
        "--count", type=_positive, metavar="N", help=f"questions of each task and length (default {commands.COUNT})"
    )
    evaluate.add_argument("--seed", type=int, metavar="N", help=f"which questions (default {commands.SEED})")
    evaluate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table as a picture too")
    _harness_options(evaluate)
    _suite_options(evaluate)


def _generate_options(generate: argparse.ArgumentParser) -> None:
    _model(generate)
    _checkpoint(generate, "last")
    _device(generate)
    text = "text to continue (default: empty, which begins a new document); may be repeated"
    generate.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "continue each prompt N times, in batches, with the seeds SEED, SEED + 1, ... (default 1)"
    generate.add_argument("--samples", type=_positive, default=1, metavar="N", help=text)
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
    _model(export)
    _checkpoint(export, "the run's export.checkpoint")
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
    inspect.add_argument("--rows", type=_positive, default=1, metavar="N", help="number of rows to print (default 1)")
    inspect.add_argument("--domain", metavar="NAME", help="print only rows of this domain")


def _add_ladder(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`ladder` prints a table, and has a command of its own."""
    text = "compare the rungs of a ladder of models: parameters, operations, tokens, memory, learning rate, hours"
    ladder = subparsers.add_parser("ladder", help=text, description=text, allow_abbrev=False)
    ladder.set_defaults(command=commands.ladder, name="ladder")
    text = "families of configs/ladder to print (default dense,hybrid; there is micro too)"
    ladder.add_argument("--families", type=_names, default=["dense", "hybrid"], metavar="A,B", help=text)
    text = "a configuration to print instead of the families; may be repeated"
    ladder.add_argument("--config", action="append", type=Path, dest="configs", metavar="YAML", help=text)
    ladder.add_argument(
        "--gpu", choices=[gpu.key for gpu in GPUS], default="h200", help="GPU of the hours (default h200)"
    )
    text = "MFU: operations of the model as a share of the bf16 peak of the GPU (default 0.4)"
    ladder.add_argument("--mfu", type=_share, default=0.4, metavar="X", help=text)
    text = "tokens of a row (default: those of each rung)"
    ladder.add_argument("--row-length", type=_positive, metavar="N", help=text)
    text = "rule for learning rate and batch (default: that of each rung)"
    ladder.add_argument("--hyperparameters", choices=["step-law", "svend"], help=text)
    text = "tokens of the training for each parameter (default: that of each rung)"
    ladder.add_argument("--tokens-per-parameter", type=_positive, metavar="N", help=text)
    ladder.add_argument("--json", action="store_true", help="print JSON instead of a table")
    actions = ladder.add_subparsers(dest="action", metavar="COMMAND")
    cli_ladder.add_commands(actions)
    text = (
        "forecast the held-out loss of a rung from smaller ones, and judge the measured loss; exit code 1 if it is "
        "outside of the band, or with too few rungs"
    )
    forecast = actions.add_parser("forecast", help=text, description=text, allow_abbrev=False)
    forecast.set_defaults(command=commands.ladder_forecast, name="ladder forecast")
    text = (
        "table, CSV or JSON lines: compute (operations of the training), loss (nats per token; empty for a rung that "
        "is not trained yet), and optionally name, seed, parameters, tokens; lines of one name are seeds of one rung; "
        "or the folder of a ladder"
    )
    forecast.add_argument("losses", type=Path, metavar="FILE", help=text)
    forecast.add_argument("--rung", metavar="NAME", help="rung to forecast (default: that with the most operations)")
    forecast.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the forecast as a picture too")
    forecast.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_reason(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`reason` has commands of its own."""
    text = "use a model that was trained in stage B"
    reason = subparsers.add_parser("reason", help=text, description=text, allow_abbrev=False)
    actions = reason.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "read a document chunk by chunk, show what the model stores, answer a question about it"
    demo = actions.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.set_defaults(command=commands.reason_demo, name="reason demo")
    _model(demo)
    _checkpoint(demo, "last")
    _device(demo)
    demo.add_argument(
        "--document", type=Path, metavar="FILE", help="UTF-8 text (default: a generated document of facts)"
    )
    demo.add_argument("--question", metavar="TEXT", help="question about --document or about --memory")
    demo.add_argument(
        "--chunks",
        type=_positive,
        default=8,
        metavar="N",
        help="approximate length of the generated document (default 8)",
    )
    demo.add_argument(
        "--number", type=_positive, default=1, metavar="N", help="number of the generated document (default 1)"
    )
    demo.add_argument(
        "--session", type=Path, metavar="FILE", help="continue from this file if it exists, and save to it"
    )
    text = "keep committed chunks in a durable index in this folder; answer from all that was read into it"
    demo.add_argument("--memory", type=Path, metavar="FOLDER", help=text)


def _harness_options(evaluate: argparse.ArgumentParser) -> None:
    """The options of `eval --harness`."""
    harness = evaluate.add_argument_group("tasks of lm-eval", "offline, unless --online")
    text = "tasks of lm-eval, of --include, or cdrmix_held_out, cdrmix_recall, cdrmix_recall_choice"
    harness.add_argument("--harness", type=_names, metavar="A,B", help=text)
    text = "folder with task files (YAML); Python functions that they name are run"
    harness.add_argument("--include", type=Path, metavar="FOLDER", help=text)
    harness.add_argument("--limit", type=_positive, metavar="N", help="documents of each task (default: all)")
    text = "examples in a prompt, unless the task fixes their number"
    harness.add_argument("--few-shot", type=_not_negative, metavar="N", help=text)
    text = f"sequences in one forward pass (default {commands.BATCH_SIZE}; with --suite {commands.SUITE_BATCH_SIZE})"
    harness.add_argument("--batch-size", type=_positive, metavar="N", help=text)
    text = "tokens that the model reads at most (default: a row of its training, or what its config.json says)"
    harness.add_argument("--max-length", type=_positive, metavar="N", help=text)
    harness.add_argument("--out", type=Path, metavar="FILE.json", help="write the full results of lm-eval")
    text = "allow the download of tasks' data from the Hugging Face hub"
    harness.add_argument("--online", action="store_true", default=None, help=text)


def _suite_options(evaluate: argparse.ArgumentParser) -> None:
    """The options of `eval --suite`."""
    suite = evaluate.add_argument_group(
        "suites", "--seed, --limit (problems of each set), --max-length and --batch-size work too"
    )
    suite.add_argument("--suite", type=_names, metavar="A,B", help="suites, such as code,choices")
    suite.add_argument("--samples", type=_positive, metavar="N", help="texts for each problem (default 1)")
    text = "sampling temperature (default 0.2; 0.8 is usual for pass@10)"
    suite.add_argument("--temperature", type=float, metavar="X", help=text)
    suite.add_argument("--max-new-tokens", type=_positive, metavar="N", help="tokens of a text (default 256)")
    text = "folder with wheels of data sets (default: installed packages; a message names the command that gets one)"
    suite.add_argument("--sets", type=Path, metavar="FOLDER", help=text)
    text = "of leak: lines of JSON with a prompt and the random secret that follows it in the training text"
    suite.add_argument("--canaries", type=Path, metavar="FILE", help=text)
    text = "of leak: lines of JSON with a prompt and a regular expression that its texts must not match (forbidden)"
    suite.add_argument("--policy", type=Path, metavar="FILE", help=text)
    text = "of leak: tokens that must follow a prefix exactly (default 32)"
    suite.add_argument("--verbatim-tokens", type=_positive, metavar="N", help=text)
    suite.add_argument("--seconds", type=float, metavar="X", help="time limit of a generated program (default 10)")
    suite.add_argument("--memory", type=_positive, metavar="MIB", help="memory of a generated program (default 512)")
    text = "run generated code even where this machine cannot confine it (Landlock, seccomp)"
    suite.add_argument("--allow-unsafe-execution", action="store_true", default=None, help=text)


def _model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", required=True, type=Path, metavar="RUN_OR_EXPORT", help="a run, checkpoint or export folder"
    )


def _checkpoint(sub: argparse.ArgumentParser, default: str) -> None:
    text = f"which of a run's: best (on held-out text), last, or a checkpoint (default: {default})"
    sub.add_argument("--checkpoint", metavar="best|last|PATH", help=text)


def _device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="device of the model (default: run.device of its configuration)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; found {text!r}")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0; found {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and of at most 1; found {text!r}")
    return share


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names with commas between; found {text!r}")
    return names


def _lengths(text: str) -> list[int]:
    """1k,4k or 1024,4096."""
    lengths = []
    for part in text.split(","):
        number = part.strip().lower()
        lengths.append(1024 * _positive(number[:-1]) if number.endswith("k") else _positive(number))
    return lengths


def _seeds(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
