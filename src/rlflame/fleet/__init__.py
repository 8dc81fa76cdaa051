"""Fleets, which run rollout tasks in this process, in worker processes or on a cluster."""
