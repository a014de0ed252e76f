"""PPO on the groups' rewards."""

from server_app.ppo.losses import (
    gae,
    masked_mean,
    policy_loss,
    shaped_rewards,
    value_loss,
    whiten,
    whiten_scores,
)

__all__ = ["gae", "masked_mean", "policy_loss", "shaped_rewards", "value_loss", "whiten", "whiten_scores"]
