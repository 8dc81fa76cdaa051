"""A fleet on a Flame cluster, whose executors may join or leave at any time."""
