"""Gradients computed in parts: shards, threads and learner processes."""
