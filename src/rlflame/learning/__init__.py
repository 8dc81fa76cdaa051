"""Algorithms: how rollouts become new weights."""
