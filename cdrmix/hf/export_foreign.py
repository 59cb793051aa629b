"""Exports a model of transformers to a folder that transformers opens by itself, with checksums and a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cdrmix.data.chat.rendering import end_of_turn
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.data.tokenizer_files import STORED
from cdrmix.errors import ExportMismatchError
from cdrmix.hf import mamba
from cdrmix.hf.card import foreign_card
from cdrmix.hf.export import PROMPT, SHARD_BYTES, publish, write_sums
from cdrmix.hf.foreign import quiet, section_of
from cdrmix.hf.load import LoadedForeign
from cdrmix.inference.load import ABOUT, CHAT_TEMPLATE
from cdrmix.json_text import parse_json
from cdrmix.run_folder import environment

# Files of a tokenizer besides tokenizer.json, and of generation: they are copied as they are.
COPIED = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *(CHAT_TEMPLATE, "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
TOLERANCE = 0.05  # largest root mean square of the difference of bfloat16 logits, in standard deviations


def export_foreign(
    loaded: LoadedForeign,
    target: Path,
    *,
    summary: Mapping[str, Any] | None = None,
    held_out_row: Sequence[int] | None = None,
    replace: bool = False,
) -> Path:
    """Writes the model to `target` and returns `target`. It appears only if the model that is read back agrees.

    The weights are float32, or bfloat16 with export.weights; rows of the embedding without a token are left out.
    summary: metrics.json of the run, for the results in the model card. held_out_row: token ids to compare, in addition
    to a fixed prompt. replace: replace an older export when the new one is complete.
    Raises ConfigError if `target` exists and replace is False, ExportMismatchError if the model that transformers reads
    back differs, DiskFullError.
    """

    def write(folder: Path) -> None:
        _write(loaded, folder, summary or {})
        _compare(loaded, folder, held_out_row)

    return publish(target, write, replace=replace)


def keep_description(described: Any, source: Path | None, folder: Path) -> None:
    """Writes the config.json of a model and copies the other files of its tokenizer; files that exist stay.

    described: the configuration as transformers reads it. source: the folder of the model, None without one.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "config.json").is_file():
        described.save_pretrained(folder)
    for name in COPIED:
        if source is not None and (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)


def _write(loaded: LoadedForeign, folder: Path, summary: Mapping[str, Any]) -> None:
    model: Any = loaded.model.transformers_model
    if model.get_input_embeddings().num_embeddings != loaded.model.vocab_size:
        model.resize_token_embeddings(loaded.model.vocab_size)
    if section_of(loaded.config).random is not None:
        _name_tokens(model, loaded.tokenizer)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[loaded.config.export.weights]
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    with quiet():
        model.config.dtype = dtype
        model.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD_BYTES)
        model.config.dtype = torch.float32
    write_companions(loaded, folder, {})
    stored = sum(parameter.numel() for parameter in model.parameters())
    card = foreign_card(loaded.config, model.config.model_type, loaded.step, stored, summary)
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_sums(folder)


def _name_tokens(model: Any, tokenizer: TextTokenizer) -> None:
    """Puts the ids of the tokenizer into the configuration of a model, instead of the defaults of its architecture."""
    begin, end = tokenizer.first_id, tokenizer.end_of_text_id
    for described in (model.config.get_text_config(), model.generation_config):
        described.bos_token_id, described.eos_token_id, described.pad_token_id = begin, end, end


def write_companions(loaded: LoadedForeign, folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes the files of the tokenizer, the configuration, and the description of the export with these facts."""
    for name in COPIED:
        if (loaded.folder / name).is_file():
            shutil.copyfile(loaded.folder / name, folder / name)
    if loaded.config.data.has_conversations():
        _stop_at_end_of_turn(folder, loaded.tokenizer)
    (folder / "tokenizer.json").write_bytes(loaded.tokenizer.json_bytes)
    if stored := loaded.tokenizer.settings(loaded.config.data.tokenizer.end_of_text):
        (folder / STORED).write_bytes(stored)
    if not (folder / "tokenizer_config.json").is_file():
        end = loaded.tokenizer.end_of_text
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "bos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "config_snapshot.yaml").write_text(loaded.config.to_yaml(), encoding="utf-8")
    about = {
        "format": "cdrmix",
        "format_version": 1,
        "step": loaded.step,
        "tokenizer_fingerprint": loaded.tokenizer.fingerprint,
        **facts,
        "environment": environment(),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def check_same_logits(
    ours: LoadedForeign, theirs: Any, held_out_row: Sequence[int] | None, *, tolerance: float, what: str
) -> None:
    """Raises ExportMismatchError if `theirs`, an exported model as it is read back, gives other logits than `ours`.

    tolerance: largest root mean square of the difference, in standard deviations of the logits; 0: no bit may differ.
    what: names `theirs` in the message.
    """
    device = next(ours.model.parameters()).device
    theirs.to(device).eval()
    length = min(ours.config.data.row_length, 256)
    rows = {"the prompt": ours.tokenizer.encode(PROMPT)}
    rows["a row of scattered tokens"] = [7919 * position % ours.model.vocab_size for position in range(length)]
    if held_out_row:
        rows["a held-out row"] = list(held_out_row)
    for name, ids in rows.items():
        ids_BT = torch.tensor([ids], device=device)
        with torch.no_grad():
            expected = ours.model.transformers_model(input_ids=ids_BT, use_cache=False).logits.float()
            actual = theirs(input_ids=ids_BT, use_cache=False).logits.float()
        difference = (expected - actual).square().mean().sqrt() / expected.std()
        same = difference <= tolerance if tolerance else torch.equal(expected, actual)  # False for NaN
        if not same:
            raise ExportMismatchError(
                f"{what} gives other logits on {name} than the trained model; difference: {difference.item():g} "
                "standard deviations"
            )


def _stop_at_end_of_turn(folder: Path, tokenizer: TextTokenizer) -> None:
    """Makes the end-of-text and the end of a turn of the chat template tokens that end a generated text."""
    template, settings = folder / CHAT_TEMPLATE, folder / "generation_config.json"
    generation = parse_json(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    ends = generation.get("eos_token_id", [])
    turn = end_of_turn(template.read_text(encoding="utf-8"), tokenizer)
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.end_of_text_id, *([] if turn is None else [turn])]
    text = json.dumps({**generation, "eos_token_id": list(dict.fromkeys(ends))}, indent=2)
    settings.write_text(text + "\n", encoding="utf-8")


def _compare(ours: LoadedForeign, folder: Path, held_out_row: Sequence[int] | None) -> None:
    """Raises ExportMismatchError if what transformers itself reads gives other logits, or lacks tensors."""
    import transformers

    with quiet():
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    if report["missing_keys"]:
        raise ExportMismatchError(f"the exported model lacks {min(report['missing_keys'])}")
    mamba.install(theirs)  # the operators of the original, so that equal weights give equal bits
    tolerance = 0.0 if ours.config.export.weights == "fp32" else TOLERANCE
    check_same_logits(ours, theirs, held_out_row, tolerance=tolerance, what="the exported model")
