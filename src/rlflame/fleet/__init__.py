"""Fleets, which run rollout tasks in the driver, in workers or on Flame."""
