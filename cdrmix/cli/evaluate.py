"""`cdrmix eval`: bits per byte on held-out text, tasks, tasks of lm-eval, suites."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cdrmix.cli.arguments import (
    add_checkpoint,
    add_device,
    add_model,
    check_writable,
    choose_checkpoint,
    chosen_device,
    length_list,
    name_list,
    non_negative_integer,
    positive_integer,
    write_file,
)
from cdrmix.cli.commands import Commands
from cdrmix.errors import ConfigError

LENGTHS, COUNT, SEED = (1024, 4096), 50, 1  # defaults of `cdrmix eval --tasks`
BATCH_SIZE = 8  # default of `cdrmix eval --harness`
SUITE_BATCH_SIZE = 32  # default of `cdrmix eval --suite`
# Options of `cdrmix eval` and the ones of --tasks, --harness and --suite with which they work.
OPTIONS_OF = {
    **dict.fromkeys(("lengths", "count", "plot"), ("tasks",)),
    **dict.fromkeys(("include", "few_shot", "out", "online"), ("harness",)),
    **dict.fromkeys(("batch_size", "max_length"), ("harness", "suite")),
    **dict.fromkeys(("samples", "temperature", "max_new_tokens", "sets", "seconds", "memory"), ("suite",)),
    **dict.fromkeys(("page", "allow_unsafe_execution", "canaries", "policy", "verbatim_tokens"), ("suite",)),
    "seed": ("tasks", "suite"),
    "limit": ("harness", "suite"),
}
EXAMPLES = {"tasks": "recall", "harness": "cdrmix_held_out", "suite": "code"}


def add(commands: Commands) -> None:
    text = (
        "measure bits per byte on held-out text, and compare with unigram, gzip, zstd; with --tasks: measure the share "
        "of right answers to generated questions, by length; with --harness: run tasks of lm-eval; with --suite: "
        "run suites, such as code, choices, long, leak, latency"
    )
    evaluate = commands.add_with_config("eval", run, text, required=False)
    add_model(evaluate)
    add_checkpoint(evaluate, "last")
    add_device(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    text = "tasks or families of tasks, such as recall,ruler,mqar,babilong; all: every one"
    evaluate.add_argument("--tasks", type=name_list, metavar="A,B", help=text)
    default = ",".join(f"{length // 1024}k" for length in LENGTHS)
    text = f"tokens of a question with its answer (default {default}; 1k is 1024); may be beyond the training length"
    evaluate.add_argument("--lengths", type=length_list, metavar="1k,4k", help=text)
    evaluate.add_argument(
        "--count", type=positive_integer, metavar="N", help=f"questions of each task and length (default {COUNT})"
    )
    evaluate.add_argument("--seed", type=int, metavar="N", help=f"which questions (default {SEED})")
    evaluate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table as a picture too")
    _harness_options(evaluate)
    _suite_options(evaluate)


def _harness_options(evaluate: argparse.ArgumentParser) -> None:
    """The options of `eval --harness`."""
    harness = evaluate.add_argument_group("tasks of lm-eval", "offline, unless --online")
    text = "tasks of lm-eval, of --include, or cdrmix_held_out, cdrmix_recall, cdrmix_recall_choice"
    harness.add_argument("--harness", type=name_list, metavar="A,B", help=text)
    text = "folder with task files (YAML); Python functions that they name are run"
    harness.add_argument("--include", type=Path, metavar="FOLDER", help=text)
    harness.add_argument("--limit", type=positive_integer, metavar="N", help="documents of each task (default: all)")
    text = "examples in a prompt, unless the task fixes their number"
    harness.add_argument("--few-shot", type=non_negative_integer, metavar="N", help=text)
    text = f"sequences in one forward pass (default {BATCH_SIZE}; with --suite {SUITE_BATCH_SIZE})"
    harness.add_argument("--batch-size", type=positive_integer, metavar="N", help=text)
    text = "tokens that the model reads at most (default: a row of its training, or what its config.json says)"
    harness.add_argument("--max-length", type=positive_integer, metavar="N", help=text)
    harness.add_argument("--out", type=Path, metavar="FILE.json", help="write the full results of lm-eval")
    text = "allow the download of tasks' data from the Hugging Face hub"
    harness.add_argument("--online", action="store_true", default=None, help=text)


def _suite_options(evaluate: argparse.ArgumentParser) -> None:
    """The options of `eval --suite`."""
    suite = evaluate.add_argument_group(
        "suites", "--seed, --limit (problems of each set), --max-length and --batch-size work too"
    )
    suite.add_argument("--suite", type=name_list, metavar="A,B", help="suites, such as code,choices")
    suite.add_argument("--samples", type=positive_integer, metavar="N", help="texts for each problem (default 1)")
    text = "sampling temperature (default 0.2; 0.8 is usual for pass@10)"
    suite.add_argument("--temperature", type=float, metavar="X", help=text)
    suite.add_argument("--max-new-tokens", type=positive_integer, metavar="N", help="tokens of a text (default 256)")
    text = "folder with wheels of data sets (default: installed packages; a message names the command that gets one)"
    suite.add_argument("--sets", type=Path, metavar="FOLDER", help=text)
    text = "of leak: lines of JSON with a prompt and the random secret that follows it in the training text"
    suite.add_argument("--canaries", type=Path, metavar="FILE", help=text)
    text = "of leak: lines of JSON with a prompt and a regular expression that its texts must not match (forbidden)"
    suite.add_argument("--policy", type=Path, metavar="FILE", help=text)
    text = "of leak: tokens that must follow a prefix exactly (default 32)"
    suite.add_argument("--verbatim-tokens", type=positive_integer, metavar="N", help=text)
    suite.add_argument("--seconds", type=float, metavar="X", help="time limit of a generated program (default 10)")
    suite.add_argument(
        "--memory", type=positive_integer, metavar="MIB", help="memory of a generated program (default 512)"
    )
    text = "write a page with tables, plots and the facts of all figures too"
    suite.add_argument("--page", type=Path, metavar="FILE.html", help=text)
    text = "run generated code even where this machine cannot confine it (Landlock, seccomp)"
    suite.add_argument("--allow-unsafe-execution", action="store_true", default=None, help=text)


def run(options: argparse.Namespace) -> int:
    kinds = [kind for kind in EXAMPLES if getattr(options, kind) is not None]
    for name, needed in OPTIONS_OF.items():
        if getattr(options, name) is not None and not set(kinds) & set(needed):
            also = f" or --{needed[1]}" if needed[1:] else ""
            raise ConfigError(
                f"--{name.replace('_', '-')} works only with --{needed[0]}{also}, for example --{needed[0]} "
                f"{EXAMPLES[needed[0]]}"
            )
    if len(kinds) > 1:
        raise ConfigError(
            "--tasks are tasks of cdrmix, --harness are tasks of lm-eval, --suite are suites: name one of the three"
        )
    choose_checkpoint(options)
    if options.suite is not None:
        return _eval_suites(options)
    if options.tasks is not None:
        return _eval_tasks(options)
    if options.harness is not None:
        return _eval_harness(options)
    from cdrmix.evaluate import evaluate_model, held_out_table
    from cdrmix.run_folder import finite

    held_out = evaluate_model(options.model, options.config, options.overrides, device=chosen_device(options))
    print(
        json.dumps(finite(held_out.as_json()), indent=2, allow_nan=False) if options.json else held_out_table(held_out)
    )
    return 0


def _eval_tasks(options: argparse.Namespace) -> int:
    from cdrmix.evaluate import evaluate_tasks

    if options.config or options.overrides:
        raise ConfigError("--tasks does not use a configuration: remove --config and the overrides")
    check_writable(options.plot, "--plot", ".png")
    scores = evaluate_tasks(
        options.model,
        options.tasks,
        options.lengths or LENGTHS,
        count=options.count or COUNT,
        seed=SEED if options.seed is None else options.seed,
        device=chosen_device(options),
    )
    if options.plot is not None:
        from cdrmix.report.plots_tasks import draw_scores

        write_file(options.plot, "--plot", draw_scores(scores, title=str(options.model)))
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0


def _eval_suites(options: argparse.Namespace) -> int:
    from cdrmix.eval.suites import SuiteOptions
    from cdrmix.evaluate import evaluate_suites

    fields = {
        "seed": options.seed,
        "samples": options.samples,
        "limit": options.limit,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "sets": options.sets,
        "seconds": options.seconds,
        "megabytes": options.memory,
        "allow_unsafe": options.allow_unsafe_execution,
        "canaries": options.canaries,
        "policy": options.policy,
        "verbatim_tokens": options.verbatim_tokens,
    }
    if "leak" not in options.suite:
        for name in ("canaries", "policy", "verbatim_tokens"):
            if fields[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')} works only with --suite leak")
    check_writable(options.page, "--page", ".html")
    given = SuiteOptions(**{name: value for name, value in fields.items() if value is not None})
    results = evaluate_suites(
        options.model,
        options.suite,
        options.config,
        options.overrides,
        options=given,
        batch_size=options.batch_size or SUITE_BATCH_SIZE,
        max_length=options.max_length,
        device=chosen_device(options),
    )
    if options.page is not None:
        from cdrmix.report.suites_page import suites_page

        write_file(options.page, "--page", suites_page(results, str(options.model)))
    if options.json:
        print(json.dumps([result.as_json() for result in results], indent=2, allow_nan=False))
    else:
        print("\n\n".join(result.table() for result in results))
    return 0


def _eval_harness(options: argparse.Namespace) -> int:
    from cdrmix.evaluate import evaluate_harness

    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: name a file in a folder that exists")
    scores = evaluate_harness(
        options.model,
        options.harness,
        options.config,
        options.overrides,
        include=options.include,
        limit=options.limit,
        few_shot=options.few_shot,
        batch_size=options.batch_size or BATCH_SIZE,
        max_length=options.max_length,
        online=bool(options.online),
        device=chosen_device(options),
    )
    if options.out is not None:
        scores.write(options.out)
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0
