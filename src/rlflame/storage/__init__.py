"""Reads and writes checkpoints, run folders, logs, replay segments and exports."""
