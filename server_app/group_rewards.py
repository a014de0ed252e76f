"""The first name of `server_app.trl_rewards`, kept importable."""

from server_app.trl_rewards import GroupRewards, LocalGroups

__all__ = ["GroupRewards", "LocalGroups"]
