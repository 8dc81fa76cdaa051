"""A fleet on a Flame cluster, whose executors come and go."""
