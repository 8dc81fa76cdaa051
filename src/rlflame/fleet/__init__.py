"""Where rollout tasks run: in this process, in local worker processes, or on a Flame cluster."""
