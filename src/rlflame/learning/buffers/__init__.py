"""Buffers that turn rollouts into batches of new or replayed steps."""
