"""Buffers that provide batches: an iteration's rollouts, or replayed steps."""
