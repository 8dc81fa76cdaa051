"""Where rollout tasks run: in this process, in worker processes, or on a cluster."""
