"""The server's side: the policy, SFT, rollouts, PPO, strategies and checkpoints."""
