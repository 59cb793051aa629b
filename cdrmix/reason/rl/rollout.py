"""Rollouts: many rows are generated token by token on the model's recurrent cache, with each token's probability.

A prompt is read once, in one pass, and any number of rows can continue from its cache. Each further token costs one
pass of one token. The cache of a recurrent mixer does not grow.

Shapes: B rows, L tokens of a prompt, N new tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.errors import NonFiniteLogitsError
from cdrmix.inference.sampling import inverse
from cdrmix.model.decoding import Prefix, Rows, evaluating, prefill, repeat
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.ops import decode as decode_step


class Generated(NamedTuple):
    """Generated tokens. log_probs_BN: float32, under the distribution sampled from (greedy: under the model's own).

    mask_BN: bool, False after a row's end, where tokens are the end token and log_probs are 0.
    """

    tokens_BN: Tensor
    log_probs_BN: Tensor
    mask_BN: Tensor


def decode(
    model: LanguageModel,
    prefix: Prefix,
    new_tokens: int,
    *,
    temperature: float,
    generator: torch.Generator,
    end: int | None = None,
    own: bool = False,
) -> Generated:
    """Generates up to new_tokens after a prefix, for every row. Temperature 0 takes the most probable token.

    generator: of the CPU. It gives one number for each row and token, all at once and in this order. The tokens of a
    row therefore depend neither on the other rows nor on where those end. end: the token that ends a row. own: nobody
    else uses the prefix, and the caller will not use it again.
    Raises NonFiniteLogitsError for logits that are not finite.
    """
    assert new_tokens > 0
    assert temperature >= 0
    batch, device = len(prefix.logits_BV), prefix.logits_BV.device
    points_BN = torch.empty(0)
    if temperature:
        points_BN = torch.rand(batch, new_tokens, generator=generator, dtype=torch.float64).to(device)
    tokens_NB = torch.full((new_tokens, batch), 0 if end is None else end, device=device)
    log_probs_NB = torch.zeros(new_tokens, batch, device=device)
    mask_NB = torch.zeros(new_tokens, batch, dtype=torch.bool, device=device)
    points_NB = points_BN.mT.contiguous() if temperature else points_BN
    going_R = None  # the rows without an end so far, as the batch has them; the others leave it. None: all
    with evaluating(model):
        logits_RV, rows = prefix.logits_BV, None if new_tokens == 1 else Rows(model, prefix, new_tokens - 1, own=own)
        for number in range(new_tokens):
            here = slice(None) if going_R is None else going_R
            token_R, log_prob_R = _take(logits_RV, temperature, points_NB[number, here] if temperature else None)
            tokens_NB[number, here], log_probs_NB[number, here], mask_NB[number, here] = token_R, log_prob_R, True
            if rows is None or number + 1 == new_tokens:
                break
            ended = [] if end is None else [row for row, token in enumerate(token_R.tolist()) if token == end]
            if len(ended) == len(token_R):
                break
            if ended:
                order = torch.tensor(rows.drop(ended, len(token_R)), device=device)
                going_R, token_R = order if going_R is None else going_R[order], token_R[order]
            logits_RV = rows.read(token_R)
    tokens_BN, log_probs_BN, mask_BN = (each.mT.contiguous() for each in (tokens_NB, log_probs_NB, mask_NB))
    if not log_probs_BN.isfinite().all():
        raise NonFiniteLogitsError("the logits of a rollout are not finite; this step was not trained on")
    return Generated(tokens_BN, log_probs_BN, mask_BN)


def generate(
    model: LanguageModel,
    prompts_BL: Tensor,
    new_tokens: int,
    *,
    temperature: float,
    generator: torch.Generator,
    end: int | None = None,
    cache: Cache | None = None,
    group: int = 1,
) -> Generated:
    """Prefills prompts of one length and continues each of them `group` times, in adjacent rows."""
    with evaluating(model):
        prefix = prefill(model, prompts_BL, cache)
        prefix = repeat(prefix, group) if group > 1 else prefix
        return decode(model, prefix, new_tokens, temperature=temperature, generator=generator, end=end, own=True)


class Taken(NamedTuple):
    """logits_SNV: of every token that was generated. balance: the routers' weighted losses, 0 without routers."""

    logits_SNV: Tensor
    balance: Tensor


def taken(model: LanguageModel, prompts_SL: Tensor, tokens_SN: Tensor, mask_SN: Tensor | None = None) -> Taken:
    """One differentiable pass over prompts and the tokens that were generated after them.

    mask_SN: bool, which tokens were generated; None: all. Positions that predict none of them are filling: no router
    sees them.
    """
    tokens_N = None
    if mask_SN is not None and model.config.routers and not mask_SN[:, 1:].all():
        is_token_SP = torch.cat([torch.ones_like(prompts_SL, dtype=torch.bool), mask_SN[:, 1:]], 1)
        tokens_N = is_token_SP.flatten().nonzero().squeeze(1)
    output = model(torch.cat([prompts_SL, tokens_SN[:, :-1]], 1), tokens_N=tokens_N)
    logits = model.logits(output.hidden_BTD[:, prompts_SL.shape[1] - 1 :])
    balance = logits.new_zeros(()) if output.router is None else output.router.loss(model.config.feed_forward)
    return Taken(logits, balance)


def micro_batches(
    columns: Sequence[Tensor], rows: int, rank: int = 0, processes: int = 1, least: int = 0
) -> list[list[Tensor]]:
    """Cuts columns of sequences into micro-batches of `rows` sequences for each process; gives those of process `rank`.

    The last column is the mask. Every process gets the same number of micro-batches, at least `least`, since
    collectives wait for every process. A micro-batch without a sequence gets one that is masked out.
    """
    stride = rows * processes
    starts = range(0, max(len(columns[0]), least * stride), stride)
    cuts = []
    for start in starts:
        cut = [column[start + rank : start + stride : processes] for column in columns]
        if not len(cut[0]):
            cut = [*(column[:1] for column in columns[:-1]), torch.zeros_like(columns[-1][:1])]
        cuts.append(cut)
    return cuts


def _take(logits_BV: Tensor, temperature: float, points_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token of each row and its log probability."""
    if decode_step.is_served(logits_BV):
        return decode_step.choose(logits_BV.contiguous(), temperature, points_B)
    if points_B is None:
        log_probs_BV = logits_BV.log_softmax(-1)
        token_B1 = logits_BV.argmax(-1, keepdim=True)
    else:
        log_probs_BV = (logits_BV / temperature).log_softmax(-1)
        token_B1 = inverse(log_probs_BV.exp().double(), points_B.unsqueeze(1))
    return token_B1.squeeze(1), log_probs_BV.gather(1, token_B1).squeeze(1).float()
