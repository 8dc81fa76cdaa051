"""A helper process that computes the critic's half of a PPO update."""
