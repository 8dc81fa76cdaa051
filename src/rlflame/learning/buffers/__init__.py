"""Buffers that provide batches: the rollouts of one iteration, or a replay."""
