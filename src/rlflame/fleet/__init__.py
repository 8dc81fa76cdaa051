"""Fleets, which run rollout tasks in the driver, in worker processes or on a cluster."""
