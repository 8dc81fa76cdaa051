"""Runs and sweeps: training from a config or a checkpoint."""
