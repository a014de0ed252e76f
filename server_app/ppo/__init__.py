"""PPO on the groups' rewards."""
