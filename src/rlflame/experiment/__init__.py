"""Runs and sweeps: train from a config or a checkpoint to a result."""
