"""PPO as pure functions on tensors (appendix "Complete PPO Objective and Reward Integration").

Axis letters: J rollouts, T response tokens. Every mask is bool and True where a token counts: the response's tokens up
to and including its end-of-sequence token. Results are 0 outside it. Other tensors must be floating point and of the
shape in their names, as broadcasting would silently give a wrong number.
"""

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8
VALUE_COEFFICIENT = 0.2  # the paper's c1 (PPO table)
REWARD_CLAMP = 5.0  # appendix "Format Scoring"


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Mean of `value` over the True entries of `mask` (any shape, the same); 0 where there are none."""
    return (value * mask).sum() / mask.sum().clamp(min=1)


def whiten(value: Tensor, mask: Tensor) -> Tensor:
    """Scale the True entries of `mask` (same shape) to mean 0 and unit variance (unbiased); equal entries become 0."""
    count = mask.sum().clamp(min=1)
    mean = masked_mean(value, mask)
    variance = ((value - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    return (value - mean) * torch.rsqrt(variance + VARIANCE_EPSILON) * mask


def whiten_scores(score_J: Tensor) -> Tensor:
    """Whiten the aggregated rewards of one batch and clamp them to +-`REWARD_CLAMP`."""
    return whiten(score_J, torch.ones_like(score_J, dtype=torch.bool)).clamp(-REWARD_CLAMP, REWARD_CLAMP)


def _same_shape(*tensors_JT: Tensor) -> None:
    assert len({tensor.shape for tensor in tensors_JT}) == 1, [tuple(tensor.shape) for tensor in tensors_JT]


def shaped_rewards(
    score_J: Tensor, logprob_JT: Tensor, reference_logprob_JT: Tensor, mask_JT: Tensor, *, kl_coefficient: float
) -> Tensor:
    """Equation 13, reward with KL penalty, on every token t, with the score s on the last token T:

        r_t = -β (log π(a_t | s_t) - log π_ref(a_t | s_t)) + s 1[t = T]

    With the groups' aggregated reward, whitened, as score, a row sums to the federated objective (Equation 1),

        Agg(r_j) - β KL[π ‖ π_ref]

    where the divergence is estimated on the sampled tokens. π is the policy before the update, `kl_coefficient` the
    paper's β. Each row of the mask needs a True. The result is (J, T).
    """
    _same_shape(logprob_JT, reference_logprob_JT, mask_JT)
    reward_JT = -kl_coefficient * (logprob_JT - reference_logprob_JT) * mask_JT
    last_J = mask_JT.sum(1, keepdim=True) - 1
    return reward_JT.scatter_add(1, last_J, score_J.to(reward_JT.dtype).unsqueeze(1))


def gae(
    reward_JT: Tensor, value_JT: Tensor, mask_JT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Equation 11, generalised advantage estimation:

        A_t = δ_t + γ λ A_{t+1},   δ_t = r_t + γ V(s_{t+1}) - V(s_t)

    V(s_t) is the value before token t; the episode ends with the last real token. `gamma` and `gae_lambda` lie in
    [0, 1].

    Returns:
        Advantages and returns (advantage + value), both (J, T).
    """
    _same_shape(reward_JT, value_JT, mask_JT)
    reward_JT, value_JT = reward_JT * mask_JT, value_JT * mask_JT
    advantage_JT = torch.zeros_like(reward_JT)
    running_J = torch.zeros_like(reward_JT[:, 0])
    next_value_J = torch.zeros_like(running_J)
    for t in range(reward_JT.shape[1] - 1, -1, -1):
        delta_J = reward_JT[:, t] + gamma * next_value_J - value_JT[:, t]
        running_J = delta_J + gamma * gae_lambda * running_J
        advantage_JT[:, t] = running_J
        next_value_J = value_JT[:, t]
    return advantage_JT, advantage_JT + value_JT


def leave_one_out(reward_J: Tensor, *, per_question: int) -> Tensor:
    """Each reward less the mean reward of the same question's other answers (RLOO, Ahmadian et al. 2024): (J,).

    The answers to a question are adjacent, `per_question` >= 2 of them. Not in the paper, which uses Equation 11.
    """
    by_question = reward_J.view(-1, per_question)
    others = (by_question.sum(1, keepdim=True) - by_question) / (per_question - 1)
    return (by_question - others).view(-1)


def full_loss(*, policy: Tensor | float = 0.0, value: Tensor | float = 0.0, num_tokens: int) -> Tensor:
    """Equation 7, full PPO loss, per token; the PPO table gives the entropy no weight (c₂ = 0):

        L = (L_POLICY + c₁ L_VF) / N

    Takes the sums of a micro-batch and the token count of its mini-batch, so that micro-batches add up to the mean.
    """
    return torch.as_tensor(policy / num_tokens + VALUE_COEFFICIENT * value / num_tokens)


def policy_loss(
    logprob_JT: Tensor,
    old_logprob_JT: Tensor,
    advantage_JT: Tensor,
    importance_JT: Tensor,
    mask_JT: Tensor,
    *,
    clip_range: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 8, policy loss:

        L_POLICY = -Σ_t min(ρ_t A_t, clip(ρ_t, 1 - ε, 1 + ε) A_t),   ρ_t = π / π_old

    The paper states the maximised objective; this is its negative. It is a sum, not a mean, so that any split into
    micro-batches adds up to the same mini-batch loss. Advantages must be whitened; `clip_range` is the paper's ε > 0.
    `importance_JT` multiplies each token's term, and corrects for tokens sampled from another distribution than π_old.

    Returns:
        Scalar sums over tokens: the loss; tokens with the larger loss on the clipped branch; 0.5 (log ratio)^2.
    """
    _same_shape(logprob_JT, old_logprob_JT, advantage_JT, importance_JT, mask_JT)
    log_ratio_JT = (logprob_JT - old_logprob_JT) * mask_JT
    ratio_JT = log_ratio_JT.exp()
    plain_JT = -advantage_JT * ratio_JT
    clipped_JT = -advantage_JT * ratio_JT.clamp(1 - clip_range, 1 + clip_range)
    loss = (importance_JT * torch.maximum(plain_JT, clipped_JT) * mask_JT).sum()
    with torch.no_grad():
        clipped = (clipped_JT > plain_JT).sum()
        approximate_kl = 0.5 * log_ratio_JT.square().sum()
    return loss, clipped, approximate_kl


def value_loss(
    value_JT: Tensor, old_value_JT: Tensor, return_JT: Tensor, mask_JT: Tensor, *, clip_range: float
) -> Tensor:
    """Equation 9, value loss, where V'_t is V_t cut to at most `clip_range` from the value at rollout time:

        L_VF = Σ_t ½ max((V_t - R_t)², (V'_t - R_t)²)

    The returns R of `gae` replace the paper's sum of discounted rewards.
    """
    _same_shape(value_JT, old_value_JT, return_JT, mask_JT)
    near_JT = torch.maximum(torch.minimum(value_JT, old_value_JT + clip_range), old_value_JT - clip_range)
    error_JT = torch.maximum((value_JT - return_JT).square(), (near_JT - return_JT).square())
    return 0.5 * (error_JT * mask_JT).sum()


def entropy(logprob_JT: Tensor, mask_JT: Tensor) -> Tensor:
    """Equation 10, entropy, estimated on the sampled tokens as their mean -log π. Only reported.

    H = -Σ_x π(x) log π(x)
    """
    return -masked_mean(logprob_JT, mask_JT)
