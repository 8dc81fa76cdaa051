"""Fleets, which run rollout tasks in this process, in workers or on a cluster."""
