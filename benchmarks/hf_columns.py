"""The columns of the matrix of docs/huggingface.md: what cdrmix does with a tiny random model of an architecture.

A column is a function from an architecture to a Cell. `benchmarks/hf_matrix.py` runs each cell in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

import hf_training
import torch
from hf_tiny import Cell, batch, build, shown
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import logging

from cdrmix.errors import ConfigError
from cdrmix.hf import mamba
from cdrmix.hf.head import head_layer, head_logits, head_loss, probe_head
from cdrmix.hf.packing import choose_packing, decode


def packed(architecture: str) -> Cell:
    """How packed documents are isolated, and how far their logits and gradients are from those of separate passes.

    Logits: the largest difference, in standard deviations. Gradients: the largest relative difference of a parameter's.
    Good: at most 5e-6 and 1e-5; documents in rows of their own are good too.
    """
    model = build(architecture)
    ids, targets, _, cu_seqlens = batch()
    flat = ids.view(1, -1)
    passes = [
        model(input_ids=flat[:, start:end], use_cache=False).logits[0] for start, end in itertools.pairwise(cu_seqlens)
    ]
    wanted, wanted_gradients = gradients(model, torch.cat(passes).float(), targets)
    mamba.install(model)
    try:
        packing = choose_packing(model)
    except ConfigError:
        packing = choose_packing(model, "rows")
    hidden = decode(model, packing, ids, cu_seqlens).hidden_BTD.flatten(0, 1)
    logits, found = gradients(model, head_logits(probe_head(model), head_layer(model), hidden), targets)
    sigma = float((logits - wanted).abs().max() / wanted.std())
    least = 1e-3 * max(gradient.norm() for gradient in wanted_gradients)
    relative = max(
        float((gradient - expected).norm() / expected.norm().clamp(min=least))
        for gradient, expected in zip(found, wanted_gradients, strict=True)
    )
    how = packing.way + (", operators of cdrmix" if packing.operators else "")
    return Cell(f"{how} ({shown(sigma)}, {shown(relative)})", sigma <= 5e-6 and relative <= 1e-5)


def loss(architecture: str) -> Cell:
    """The path of the loss by the formula of the head, and its relative difference from the loss of the model's logits.

    Good: at most 1e-6.
    """
    model = build(architecture)
    ids, targets, weights, _ = batch()
    head, layer = probe_head(model), head_layer(model)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
        own = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = head_loss(head, layer, hidden.flatten(0, 1), targets.flatten(), weights.flatten())
    difference = abs(float(ours / own.sum()) - 1)
    formula = {"linear": "", "scaled": f", scale {head.scale:g}", "bias": ", bias"}.get(head.kind, ", softcap")
    return Cell(f"{'fused' if head.fused else 'by chunks'}{formula} ({shown(difference)})", difference <= 1e-6)


COLUMNS: dict[str, tuple[str, Callable[[str], Cell]]] = {
    "packed": ("packed documents isolated by (logits, gradients)", packed),
    "loss": ("loss (difference)", loss),
    "zero": ("ZeRO (stages 1 and 2, stage 3)", hf_training.zero),
    "lora": ("LoRA (merged)", hf_training.lora),
    "resume": ("resumed", hf_training.resume),
}


def cell(architecture: str, column: str) -> Cell:
    """Runs one cell, deterministic, on one thread, without fla, whose kernels need a GPU."""
    if not torch.cuda.is_available():
        sys.modules["fla"] = None  # type: ignore[assignment]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # an optimizer in DeepSpeed would load the compiler
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return COLUMNS[column][1](architecture)


def gradients(model: PreTrainedModel, logits: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the gradients of their summed loss; zeros where a parameter has none."""
    model.zero_grad()
    functional.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    return logits.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
