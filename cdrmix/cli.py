"""The command line: argv to a configuration to the package that serves it.

Every error that a person can mend is a CdrmixError: its message goes to standard error, its exit code to the shell.
Packages are imported where a command needs them, so that `cdrmix --help` does not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.data.visible import visible
from cdrmix.errors import CdrmixError, ConfigError, DiskFullError, Preempted
from cdrmix.gpus import GPUS
from cdrmix.training import launch

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE
UNEXPECTED = 70  # sysexits.h EX_SOFTWARE: our mistake, not the person's
# Of a place that a person named: --out, --model, a run folder.
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
OVERRIDES = "key.path=value arguments after --config X override keys of the file, for example train.steps=100"

GUTTER = (
    "Text stands behind a gutter: its loss weight where that is not 1, then | for a line, : for the rest of one, "
    "> for a special token. Control characters are spelled out: <U+001B>."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (0, or a CdrmixError's).

    Raises SystemExit with 70, after printing where it arose, for an error that nobody foresaw: 1 is `compare`'s answer.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(arguments)
    except Exception as error:
        message = "cdrmix: error: this was not foreseen; the lines above tell where it happened"
        raise SystemExit(_fail(UNEXPECTED, message, show_traceback=True)) from error
    finally:
        if launch.is_worker():
            launch.end_work()


def _run(arguments: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(arguments)
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
        # The reader (head, less) went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" while writing {error.filename}" if error.filename else ""
            return _fail(
                DiskFullError.exit_code, f"cdrmix: error: the disk is full{where}; free some space", show_traceback
            )
        if error.errno not in UNUSABLE or not error.filename:
            raise
        message = f"cdrmix: error: cannot use {error.filename}: {error.strerror}"
        return _fail(ConfigError.exit_code, message, show_traceback)


def train_main() -> int:
    """`cdrmix-train ...` is `cdrmix train ...`."""
    return main(["train", *sys.argv[1:]])


def _fail(status: int, message: str, show_traceback: bool, *, agreed: bool = False) -> int:
    """Says what went wrong. `agreed`: every process of the run fails alike, so none need be stopped by torchrun."""
    if show_traceback:
        message = traceback.format_exc() + message
    if launch.is_worker():
        launch.report_failure(status, message)
        return 0 if agreed else status
    print(visible(message), file=sys.stderr)
    return status


def _overrides(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    for word in rest:
        if word.startswith("-") or "=" not in word or not hasattr(options, "config"):
            raise ConfigError(
                f"unknown argument {word!r}; `cdrmix {options.name} --help` lists what is known"
                + (f" ({OVERRIDES})" if hasattr(options, "config") else "")
            )
    return list(rest)


def parser() -> argparse.ArgumentParser:
    """The parser of every command; each sets `command`, a function of the parsed options that returns an exit code."""
    top = argparse.ArgumentParser(
        prog="cdrmix",
        description="Train mixture-of-experts models that mix RWKV-7 and attention, from raw text to an export.",
        allow_abbrev=False,
    )
    top.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    commands = top.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(name: str, command: object, text: str, *, config: bool | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, epilog=OVERRIDES if config is not None else None
        )
        sub.set_defaults(command=command)
        if config is not None:
            sub.add_argument("--config", required=config, type=Path, metavar="YAML", help="the configuration file")
        return sub

    train = add("train", _train, "prepare text, train, evaluate, export and report: one run", config=True)
    train.add_argument("--nproc", type=_positive, default=1, metavar="N", help="processes on this machine (torchrun)")
    train.add_argument("--resume", metavar="auto|PATH", help="go on with an unfinished run of this configuration")
    text = (
        "print what the run takes on this machine and stop: exit 2 where it does not fit, 3 where its text is not there"
    )
    train.add_argument("--dry-run", action="store_true", help=text)
    _add_data(commands)
    add("validate", _validate, "check a configuration and print it with every key resolved", config=True)
    text = "what training takes: memory by component, operations, time, disk; and what would fit where it does not"
    plan = add("plan", _plan, text, config=True)
    plan.add_argument(
        "--gpu",
        choices=[*(gpu.key for gpu in GPUS), "cpu"],
        help="for this card (default: what run.device means on this machine)",
    )
    plan.add_argument("--gpus", type=_positive, default=1, metavar="N", help="devices, one a process (default 1)")
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table; unknown figures are null")
    add("params", _params, "count parameters, stored and active, without building the model", config=True)

    text = (
        "held-out bits per byte of a model, beside unigram, gzip -9 and zstd -19; with --tasks instead its share of "
        "right answers to generated questions, by length"
    )
    evaluate = add("eval", _eval, text, config=False)
    _model(evaluate)
    _device(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    text = "tasks or families of tasks, such as recall,ruler,mqar,babilong; all: every one"
    evaluate.add_argument("--tasks", type=_names, metavar="A,B", help=text)
    text = "tokens of a question with its answer (default 1k,4k; 1k is 1024); may be beyond the training length"
    evaluate.add_argument("--lengths", type=_lengths, metavar="1k,4k", help=text)
    evaluate.add_argument("--count", type=_positive, metavar="N", help="questions of each task and length (default 50)")
    evaluate.add_argument("--seed", type=int, metavar="N", help="which questions (default 1)")
    evaluate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table as a picture too")
    generate = add("generate", _generate, "let a model continue a prompt, streaming")
    _model(generate)
    _device(generate)
    generate.add_argument("--prompt", default="", help="text to continue; empty: a new document")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    generate.add_argument("--top-p", type=float, default=0.95, help="least probability mass kept (default 0.95)")
    generate.add_argument("--top-k", type=int, default=0, help="tokens kept; 0: all (default)")
    generate.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default 1)")
    generate.add_argument("--min-p", type=float, default=0.0, help="least share of the likeliest's (default 0: none)")
    text = "above 1, tokens that were there become less likely (default 1)"
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help=text)
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated"
    )
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="stop after N (default 256)")
    export = add("export", _export, "write a run's model as a checksummed, read-only folder")
    _model(export)
    text = "which of a run's: best (on held-out text), last, or a checkpoint (default: the run's export.checkpoint)"
    export.add_argument("--checkpoint", metavar="best|last|PATH", help=text)
    where = export.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="PATH", help="the new folder (default: export/ in the run folder)")
    where.add_argument(
        "--rwkv", type=Path, metavar="OUT.pth", help="instead, the weights of a pure RWKV-7 for the rwkv package"
    )
    _add_reason(commands)
    ablate = add(
        "ablate", _ablate, "train small models with a mechanism on and off, and print what it does", config=True
    )
    ablate.add_argument("--seeds", type=_seeds, metavar="1,2,3", help="these seeds (default: the file's)")
    ablate.add_argument("--arms", type=lambda text: text.split(","), metavar="A,B", help="these arms (default: all)")
    ablate.add_argument("--out", type=Path, metavar="FOLDER", help="of results (default: experiments/ablations)")
    compare = add("compare", _compare, "whether two runs ended with the same weights, bit for bit (exit 0) or not (1)")
    compare.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run, checkpoint or export folder")
    report = add("report", _report, "draw loss.png and write report.html of a run")
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    return top


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`data` has commands of its own."""
    text = "work on the text alone: prepare shards, look into them"
    data = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
    actions = data.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "clean, deduplicate and tokenise the text into shards, which later runs reuse; prints their folder last"
    prepare = actions.add_parser("prepare", help=text, description=text, allow_abbrev=False, epilog=OVERRIDES)
    prepare.set_defaults(command=_data_prepare, name="data prepare")
    prepare.add_argument("--config", required=True, type=Path, metavar="YAML", help="the configuration file")
    text = "print the figures of prepared shards, and rows of them decoded, document by document"
    inspect = actions.add_parser("inspect", help=text, description=text, allow_abbrev=False, epilog=GUTTER)
    inspect.set_defaults(command=_data_inspect, name="data inspect")
    inspect.add_argument("shards", type=Path, metavar="SHARDS", help="the folder that `cdrmix data prepare` printed")
    inspect.add_argument("--split", choices=["train", "valid"], default="train", help="default: train")
    inspect.add_argument("--row", type=int, metavar="N", help="the first row to print, from 0 (default: the first)")
    inspect.add_argument("--rows", type=_positive, default=1, metavar="N", help="how many rows to print (default 1)")
    inspect.add_argument("--domain", metavar="NAME", help="only rows of this domain")


def _add_reason(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`reason` has commands of its own."""
    text = "work with a model that has been through stage B"
    reason = commands.add_parser("reason", help=text, description=text, allow_abbrev=False)
    actions = reason.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = "read a long document chunk by chunk, show what is written and remembered, answer a question about it"
    demo = actions.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.set_defaults(command=_reason_demo, name="reason demo")
    _model(demo)
    _device(demo)
    demo.add_argument("--document", type=Path, metavar="FILE", help="UTF-8 text (default: one of generated facts)")
    demo.add_argument("--question", metavar="TEXT", help="what to answer; goes with --document")
    demo.add_argument(
        "--chunks", type=_positive, default=8, metavar="N", help="of the generated one, about (default 8)"
    )
    demo.add_argument("--number", type=_positive, default=1, metavar="N", help="which generated one (default 1)")
    demo.add_argument("--session", type=Path, metavar="FILE", help="go on from this file where it is there; save there")
    text = "keep what is committed in an index in this folder, durably; answer from what any process has read into it"
    demo.add_argument("--memory", type=Path, metavar="FOLDER", help=text)


def _model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", required=True, type=Path, metavar="RUN_OR_EXPORT", help="a run, checkpoint or export folder"
    )


def _device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="where the model runs (default: its configuration's run.device)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; found {text!r}")
    return int(text)


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


def _train(options: argparse.Namespace) -> int:
    from cdrmix.config.load import load_config

    config = load_config(options.config, options.overrides)
    if options.dry_run:
        if options.resume:
            raise ConfigError("--dry-run plans a run from its start: leave out --resume")
        from cdrmix.data.prepare import open_inputs

        status = _print_plan(config, None, options.nproc, False)
        open_inputs(config)  # what is missing of them would stop the run too
        return status
    if options.nproc > 1:
        launch.check_processes(config, options.nproc)
        arguments = ["train", "--config", str(options.config), *options.overrides]
        arguments += ["--resume", options.resume] if options.resume else []
        arguments += ["--traceback"] if options.traceback else []
        status, message = launch.launch(options.nproc, arguments)
        if message:
            print(message, file=sys.stderr)
        return status
    from cdrmix.workflow import run_all

    run_all(config, options.resume)
    return 0


def _data_prepare(options: argparse.Namespace) -> int:
    from cdrmix.config.load import load_config
    from cdrmix.data.prepare import prepare

    print(prepare(load_config(options.config, options.overrides)).path)
    return 0


def _data_inspect(options: argparse.Namespace) -> int:
    from cdrmix.data.inspection import inspect

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _show_every_character()
    for line in inspect(
        options.shards,
        split=options.split,
        row=options.row,
        rows=options.rows,
        domain=options.domain,
        coloured=coloured,
    ):
        print(line)
    return 0


def _validate(options: argparse.Namespace) -> int:
    from cdrmix.config.load import dump_config, load_config
    from cdrmix.data.prepare import check_names

    config = load_config(options.config, options.overrides)
    check_names(config)
    if config.reasoning is not None:
        from cdrmix.reason.stage_b import check_stage_b

        check_stage_b(config)
    print(dump_config(config), end="")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from cdrmix.config.load import load_config

    return _print_plan(load_config(options.config, options.overrides), options.gpu, options.gpus, options.json)


def _print_plan(config: Config, gpu: str | None, processes: int, as_json: bool) -> int:
    """Exit code 0 where the configuration fits, or nobody knows; 2 where not."""
    import torch

    from cdrmix.plan.machine import machine_for
    from cdrmix.plan.plan import make_plan, plan_table
    from cdrmix.runtime import check_cpu, check_gpu

    launch.check_processes(config, processes)
    machine = machine_for(config, gpu, processes)
    if machine.platform == "cpu":
        check_cpu(config.train.precision)
    elif machine.at_hand:
        check_gpu(torch.device("cuda", 0), config.train.precision)
    plan = make_plan(config, machine, processes, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(plan.as_json(), indent=2, allow_nan=False) if as_json else plan_table(plan))
    return ConfigError.exit_code if plan.fit.fits is False else 0


def _params(options: argparse.Namespace) -> int:
    from cdrmix.config.load import load_config
    from cdrmix.plan.parameters import count_parameters, parameter_table

    config = load_config(options.config, options.overrides)
    print(parameter_table(config, count_parameters(config.model, config.reasoning)))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from cdrmix.run_folder import finite
    from cdrmix.workflow import evaluate_model, held_out_table

    if options.tasks is not None:
        return _eval_tasks(options)
    for name in ("lengths", "count", "seed", "plot"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for --tasks; name some, for example --tasks recall")
    held_out = evaluate_model(options.model, options.config, options.overrides, device=options.device)
    print(json.dumps(finite(vars(held_out)), indent=2, allow_nan=False) if options.json else held_out_table(held_out))
    return 0


def _eval_tasks(options: argparse.Namespace) -> int:
    from cdrmix.workflow import evaluate_tasks

    if options.config or options.overrides:
        raise ConfigError("a configuration says what held-out text is; questions need none: leave it out with --tasks")
    if options.plot is not None and (options.plot.suffix != ".png" or not options.plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {options.plot}: name a file FILE.png in a folder that exists")
    scores = evaluate_tasks(
        options.model,
        options.tasks,
        options.lengths or [1024, 4096],
        count=options.count or 50,
        seed=1 if options.seed is None else options.seed,
        device=options.device,
    )
    if options.plot is not None:
        from cdrmix.durable import write_atomically
        from cdrmix.report.plots_tasks import draw_scores

        write_atomically(options.plot, draw_scores(scores, title=str(options.model)))
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0


def _generate(options: argparse.Namespace) -> int:
    from cdrmix.inference.sampling import Sampling
    from cdrmix.inference.text_model import load

    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
    )
    pieces = load(options.model, device=options.device).stream(options.prompt, sampling)
    _show_every_character()
    print(options.prompt, end="", flush=True)
    for _, piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _show_every_character() -> None:
    """A terminal that cannot show a character gets its code instead of an end in the middle of the text."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _reason_demo(options: argparse.Namespace) -> int:
    from cdrmix.reason.demo import demonstrate
    from cdrmix.workflow import load_alone

    _show_every_character()
    demonstrate(
        load_alone(options.model, options.device),
        document=options.document,
        question=options.question,
        chunks=options.chunks,
        number=options.number,
        session=options.session,
        memory=options.memory,
    )
    return 0


def _ablate(options: argparse.Namespace) -> int:
    from cdrmix.reason.experiments.ablation import run

    outcome = run(options.config, options.overrides, options.seeds, options.out, arms=options.arms)
    return 0 if outcome.holds else 1


def _seeds(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _export(options: argparse.Namespace) -> int:
    from cdrmix.workflow import export_rwkv, export_to

    if options.rwkv:
        print(export_rwkv(options.model, options.rwkv, options.checkpoint))
    else:
        print(export_to(options.model, options.out, options.checkpoint))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from cdrmix.compare import compare

    comparison = compare(*options.runs)
    print("\n".join(comparison.lines))
    return 0 if comparison.identical else 1


def _report(options: argparse.Namespace) -> int:
    from cdrmix.report.report import write_report
    from cdrmix.run_folder import RunFolder

    print(write_report(RunFolder.open(options.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
