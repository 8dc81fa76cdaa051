"""Divides gradient computations among shards, threads and learner processes."""
