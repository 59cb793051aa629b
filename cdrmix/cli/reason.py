"""`cdrmix reason`: uses a model that was trained in stage B."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cdrmix.cli.arguments import (
    add_checkpoint,
    add_device,
    add_model,
    choose_checkpoint,
    chosen_device,
    length_list,
    name_list,
    positive_integer,
    show_every_character,
)
from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    actions = commands.group("reason", "use a model that was trained in stage B")
    text = "read a document chunk by chunk, show what the model stores, answer a question about it"
    demo = actions.add("demo", run_demo, text)
    text = "ask a model about documents of several lengths, with each mechanism on and off"
    evaluate = actions.add("eval", run_eval, text)
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


def run_demo(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load_cdrmix
    from cdrmix.reason.demo import demonstrate

    show_every_character()
    choose_checkpoint(options)
    demonstrate(
        load_cdrmix(options.model, chosen_device(options)),
        document=options.document,
        question=options.question,
        chunks=options.chunks,
        number=options.number,
        session=options.session,
        memory=options.memory,
    )
    return 0


def run_eval(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load_cdrmix
    from cdrmix.reason.document_evaluation import evaluate_documents, table

    choose_checkpoint(options)
    rows = evaluate_documents(
        load_cdrmix(options.model, chosen_device(options)),
        options.tasks,
        options.lengths,
        count=options.count,
        seed=options.seed,
        mechanisms=options.mechanisms,
        say=lambda line: print(line, file=sys.stderr),
    )
    print(json.dumps([row._asdict() for row in rows], indent=2) if options.json else table(rows))
    return 0
