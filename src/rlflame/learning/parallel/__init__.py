"""Divides gradient computations into shards, threads and learner processes."""
