"""Algorithms: what turns rollouts into new weights."""
