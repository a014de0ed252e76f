"""The name of version 0.1.0 for `server_app.trl_rewards`."""

from server_app.trl_rewards import GroupRewards, LocalGroups

__all__ = ["GroupRewards", "LocalGroups"]
