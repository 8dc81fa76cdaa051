"""Proximal policy optimisation (PPO)."""
