"""PPO on the groups' rewards."""

from server_app.ppo.losses import (
    entropy,
    full_loss,
    gae,
    leave_one_out,
    masked_mean,
    policy_loss,
    shaped_rewards,
    value_loss,
    whiten,
    whiten_scores,
)

__all__ = [
    "entropy",
    "full_loss",
    "gae",
    "leave_one_out",
    "masked_mean",
    "policy_loss",
    "shaped_rewards",
    "value_loss",
    "whiten",
    "whiten_scores",
]
