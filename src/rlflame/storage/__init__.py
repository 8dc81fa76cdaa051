"""Reads and writes run folders, with checkpoints, logs and replay segments."""
