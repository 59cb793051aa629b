"""Group-relative policy optimisation: the advantages of groups of rollouts, and the clipped loss of their tokens.

GRPO (arXiv 2402.03300) and its variants: DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071). There is no value
function: the baseline of a rollout is the mean reward of the rollouts of the same question.

Shapes: N rollouts, G of a group, S sequences (turns), L tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LEAST_LOG_PROB = -1e4  # p is 0 in float32 from -104 on, and 0 times -inf would be NaN
DEVIATION_FLOOR = 1e-4  # added to a group's standard deviation before it divides


@dataclass(frozen=True)
class Objective:
    """One member of the family of objectives.

    clip_low, clip_high: the ratio of new to old probability is clipped to [1 - clip_low, 1 + clip_high].
    ratio: of every token; or one of a sequence, the geometric mean over its tokens (GSPO, equation 7).
    mean: over all "tokens" (DAPO); over "sequences" of the mean over their tokens (GRPO, GSPO); or "constant", the sum
        divided by sequences * `longest` tokens, for any lengths (Dr. GRPO).
    deviation: whether advantages are divided by the group's standard deviation.
    kl_weight: of the divergence from the reference policy, by its estimator k3 = e^d - d - 1, d = log(ref / new).
    entropy_weight: of the mean entropy of a token's distribution, which the caller of `policy_loss` subtracts.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio: Literal["token", "sequence"] = "token"
    mean: Literal["tokens", "sequences", "constant"] = "tokens"
    deviation: bool = False
    kl_weight: float = 0.0
    entropy_weight: float = 0.0


OBJECTIVES = {
    "memagent": Objective(),  # MemAgent's (arXiv 2507.02259): DAPO's mean, and advantages without the deviation
    "grpo": Objective(0.2, 0.2, mean="sequences", deviation=True, kl_weight=0.04),
    "dapo": Objective(0.2, 0.28, deviation=True),
    "dr_grpo": Objective(0.2, 0.2, mean="constant"),
    "gspo": Objective(3e-4, 4e-4, ratio="sequence", mean="sequences", deviation=True),
}


class Advantages(NamedTuple):
    """advantages_N: 0 in groups whose rewards are all equal, because they teach nothing, and in those with a rollout
    without a reward. kept_N: bool, False there."""

    advantages_N: Tensor
    kept_N: Tensor
    groups: int
    dropped_groups: int


def group_advantages(
    rewards_N: Tensor, group_size: int, *, deviation: bool = False, usable_N: Tensor | None = None
) -> Advantages:
    """r - mean(r) within each group of `group_size` successive rollouts, in float64; divided by the group's standard
    deviation with `deviation`.

    The standard deviation is the sample's (G - 1). usable_N: rollouts that have a reward; None: all. Raises ValueError
    with the number of a rollout whose reward is not finite.
    """
    assert group_size > 1
    assert len(rewards_N) % group_size == 0
    bad = (~rewards_N.isfinite()).nonzero()
    if len(bad):
        n = int(bad[0])
        raise ValueError(f"the reward of rollout {n} is {rewards_N[n].item()}: a task's rewards must be finite")
    rewards = rewards_N.double().view(-1, group_size)
    kept = (rewards != rewards[:, :1]).any(1, keepdim=True)
    if usable_N is not None:
        kept &= usable_N.view(-1, group_size).all(1, keepdim=True)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if deviation:
        advantages = advantages / (rewards.std(1, keepdim=True) + DEVIATION_FLOOR)
    advantages = torch.where(kept, advantages, 0.0)
    dropped = len(kept) - int(kept.sum())
    return Advantages(advantages.flatten(), kept.expand_as(rewards).flatten(), len(kept), dropped)


class Totals(NamedTuple):
    """Divisors of means, over all micro-batches and processes of an update. longest: the most tokens allowed."""

    tokens: float
    sequences: float
    longest: int


class PolicyLoss(NamedTuple):
    """The loss (differentiable); and over the unmasked tokens their number, the numbers whose ratio was clipped from
    below and from above, and the sums of k3 and of the ratio."""

    loss: Tensor
    tokens: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    divergence: Tensor
    ratio: Tensor


def policy_loss(
    log_probs_SL: Tensor,
    old_log_probs_SL: Tensor,
    advantages_S: Tensor,
    mask_SL: Tensor,
    objective: Objective,
    totals: Totals,
    reference_log_probs_SL: Tensor | None = None,
) -> PolicyLoss:
    """-mean of min(ratio A, clip(ratio, 1 - low, 1 + high) A), plus kl_weight k3, over tokens with mask 1.

    log_probs_SL: of the generated tokens under the policy in training; old: under the policy that generated them;
    reference: None if kl_weight is 0. advantages_S: of each sequence's rollout. Values outside the mask (padding) have
    no effect. The sum over micro-batches with the same totals is the loss of the whole update.
    """
    mask_SL = mask_SL.bool()

    def counted(x_SL: Tensor) -> Tensor:
        return torch.where(mask_SL, x_SL, 0.0)

    lengths_S1 = mask_SL.sum(1, keepdim=True).clamp(min=1)
    change_SL = counted(log_probs_SL - old_log_probs_SL.detach())
    if objective.ratio == "sequence":
        change_SL = (change_SL.sum(1, keepdim=True) / lengths_S1).expand_as(change_SL)
    ratio_SL = change_SL.exp()
    advantages_S1 = advantages_S.to(ratio_SL).unsqueeze(1)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    gain_SL = torch.minimum(ratio_SL * advantages_S1, ratio_SL.clamp(low, high) * advantages_S1)
    cost_SL = -gain_SL
    divergence_SL = torch.zeros_like(ratio_SL)
    if objective.kl_weight:
        assert reference_log_probs_SL is not None, "a KL term needs the log probabilities of the reference"
        difference_SL = counted(reference_log_probs_SL.detach() - log_probs_SL)
        divergence_SL = torch.expm1(difference_SL) - difference_SL
        cost_SL = cost_SL + objective.kl_weight * divergence_SL
    weight_S1 = {
        "tokens": torch.ones_like(advantages_S1) / totals.tokens,
        "sequences": 1 / (lengths_S1.to(ratio_SL) * totals.sequences),
        "constant": torch.ones_like(advantages_S1) / (totals.sequences * totals.longest),
    }[objective.mean]
    with torch.no_grad():
        sums = [
            mask_SL.sum(),
            (mask_SL & (ratio_SL < low) & (advantages_S1 < 0)).sum(),
            (mask_SL & (ratio_SL > high) & (advantages_S1 > 0)).sum(),
            counted(divergence_SL).sum(),
            counted(ratio_SL).sum(),
        ]
    return PolicyLoss((counted(cost_SL) * weight_S1).sum(), *sums)


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p of every distribution, in nats: [..., V] to [...]. Logits can be -inf.

    The gradient of `torch.special.entr` is infinite where p underflows to 0, so log p comes from the logits.
    """
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs.clamp(min=LEAST_LOG_PROB)).sum(-1)
