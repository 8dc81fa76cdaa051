"""Gradients that are computed in parts: shards, threads, several learner processes."""
