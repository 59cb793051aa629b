"""GRPO's loss: equal to TRL's on a fixed batch, its parts by hand, and independent of padding and micro-batches."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix.reason.rl.grpo import OBJECTIVES, Objective, Totals, entropy, group_advantages, policy_loss

LENGTHS = (5, 3, 7, 1, 4, 7)
LONGEST = 7


def batch() -> dict[str, Tensor]:
    """Six sequences of float64 log probabilities, new and old apart enough to be clipped; NaN as padding."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)

    def log_probs(spread: float) -> Tensor:
        return -1 + spread * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    new = log_probs(0.3)
    old, reference = new + log_probs(0.3) + 1, new + log_probs(0.2) + 1
    found = {"log_probs_SL": new, "old_log_probs_SL": old, "reference_log_probs_SL": reference}
    found = {name: x.masked_fill(~mask, math.nan) for name, x in found.items()}
    return found | {"mask_SL": mask, "advantages_S": torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 0.7]).double()}


def totals() -> Totals:
    return Totals(sum(LENGTHS), len(LENGTHS), LONGEST)


@pytest.mark.gate
@pytest.mark.parametrize("name", [*OBJECTIVES, "dapo with a reference"])
def test_equals_trl(name: str) -> None:
    trainer = importlib.import_module("trl.trainer.grpo_trainer")  # a second, and transformers
    objective = OBJECTIVES.get(name, Objective(deviation=True, kl_weight=0.1))
    x = batch()
    new = x["log_probs_SL"].requires_grad_()
    found = policy_loss(**x, objective=objective, totals=totals())
    (gradient,) = torch.autograd.grad(found.loss, new)
    # TRL multiplies by the mask, so its padding has to be numbers.
    clean = {key: value.detach().nan_to_num(nan=-1.0) for key, value in x.items()}
    theirs = clean["log_probs_SL"].requires_grad_()
    loss = trl_loss(trainer.GRPOTrainer, objective, theirs, clean)
    (exact,) = torch.autograd.grad(loss, theirs)
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-14)


def trl_loss(trainer: Any, objective: Objective, log_probs: Tensor, x: dict[str, Tensor]) -> Tensor:
    """GRPOTrainer's loss on given log probabilities, with a trainer that has only the attributes of the formula."""
    mask = x["mask_SL"].long()
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=objective.ratio,
        beta=objective.kl_weight,
        loss_type={"tokens": "dapo", "sequences": "grpo", "constant": "dr_grpo"}[objective.mean],
        epsilon_low=objective.clip_low,
        epsilon_high=objective.clip_high,
        use_vllm=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": x["advantages_S"],
        "old_per_token_logps": x["old_log_probs_SL"],
        "ref_per_token_logps": x["reference_log_probs_SL"],
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(fake, None, inputs)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_sum_to_the_whole(name: str) -> None:
    x = batch()
    whole = policy_loss(**x, objective=OBJECTIVES[name], totals=totals())
    parts = [
        policy_loss(**{key: value[rows] for key, value in x.items()}, objective=OBJECTIVES[name], totals=totals())
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    for values, total in zip(zip(*parts, strict=True), whole, strict=True):
        torch.testing.assert_close(sum(values), total)


def test_by_hand() -> None:
    """Ratios 1.5, 0.5 and 1, A = 1 and -1: only the good one above 1.28 and the bad one below 0.8 are cut off."""
    new = torch.tensor([[math.log(1.5), math.log(0.5), 0.0]] * 2, dtype=torch.float64)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 3)
    found = policy_loss(new, torch.zeros_like(new), advantages, mask, Objective(), Totals(6, 2, 3))
    assert found.loss.item() == pytest.approx(-(1.28 + 0.5 + 1 - 1.5 - 0.8 - 1) / 6)
    assert [value.item() for value in found[1:5]] == [6, 1, 1, 0]
    assert found.ratio.item() == pytest.approx(6)


def test_padding_has_no_part_and_no_gradient() -> None:
    x = batch()
    new = x["log_probs_SL"].requires_grad_()
    found = policy_loss(**x, objective=OBJECTIVES["grpo"], totals=totals())
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert gradient.isfinite().all()
    assert (gradient[~x["mask_SL"]] == 0).all()
    assert (gradient[x["mask_SL"]] != 0).any()


def test_advantages_are_of_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 3.0])
    found = group_advantages(rewards, 4)
    assert found.advantages_N.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.75, -0.75, -0.75, 2.25]
    assert found.kept_N.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert (found.groups, found.dropped_groups) == (3, 1)
    scaled = group_advantages(rewards, 4, deviation=True)
    assert scaled.advantages_N[11].item() == pytest.approx(2.25 / (1.5 + 1e-4))
    assert scaled.advantages_N[4:8].tolist() == [0.0] * 4


def test_a_tenth_thrice_is_an_equal_group() -> None:
    """Decided by their values, because rounding can keep their deviation above 0."""
    found = group_advantages(torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64), 3)
    assert found.dropped_groups == 1
    assert found.advantages_N.tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward of rollout 2 is (nan|inf)"):
        group_advantages(torch.tensor([0.0, 1.0, bad, 0.0]), 2)


def test_entropy_of_choices_that_are_not_allowed() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [0.0] * 4])
    torch.testing.assert_close(entropy(logits), torch.tensor([math.log(2), math.log(4)]))


def test_a_group_with_a_rollout_without_a_reward_is_dropped() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    found = group_advantages(rewards, 2, usable_N=torch.tensor([True, True, True, False]))
    assert found.kept_N.tolist() == [True, True, False, False]
    assert found.advantages_N.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert found.dropped_groups == 1


def test_the_gradient_of_entropy_is_finite_where_a_probability_is_zero() -> None:
    """Against float64, in which exp(-200) is not 0. A logit of -inf gets no gradient."""
    logits = torch.tensor([[0.0, 1.0, -200.0], [2.0, 0.5, -torch.inf]], requires_grad=True)
    entropy(logits).sum().backward()
    wide = torch.tensor([[0.0, 1.0, -200.0], [2.0, 0.5, -1e3]], dtype=torch.float64, requires_grad=True)
    log_probs = wide.log_softmax(-1)
    (-(log_probs.exp() * log_probs).sum()).backward()
    assert logits.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.float())
