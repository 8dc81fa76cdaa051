"""Algorithms that compute new weights from rollouts."""
