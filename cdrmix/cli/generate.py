"""`cdrmix generate`: continues prompts."""

from __future__ import annotations

import argparse
import json
import sys

from cdrmix.cli.arguments import (
    add_checkpoint,
    add_device,
    add_model,
    choose_checkpoint,
    chosen_device,
    positive_integer,
    show_every_character,
)
from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    generate = commands.add("generate", run, "continue a prompt and print the text while it is generated")
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


def run(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load
    from cdrmix.inference.sampling import Sampling

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
    choose_checkpoint(options)
    prompts = options.prompt or [""]
    model = load(options.model, device=chosen_device(options))
    show_every_character()
    if len(prompts) == options.samples == 1 and not options.json:
        pieces = model.stream(prompts, sampling, speculative=options.speculative)
        print(prompts[0], end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print()
        _show_drafts(model.drafts)
        return 0
    samples = model.sample(prompts, options.samples, sampling, speculative=options.speculative)
    for place, (prompt, texts) in enumerate(zip(prompts, samples, strict=True), 1):
        for number, text in enumerate(texts):
            seed = options.seed + number
            if options.json:
                print(json.dumps({"prompt": prompt, "seed": seed, "text": text}))
            else:
                print(f"--- prompt {place}, seed {seed}\n{prompt}{text}")
    _show_drafts(model.drafts)
    return 0


def _show_drafts(statistics: object | None) -> None:
    """Writes the counts of speculative decoding to standard error; None: it was not used."""
    if statistics is not None:
        print(statistics, file=sys.stderr)
