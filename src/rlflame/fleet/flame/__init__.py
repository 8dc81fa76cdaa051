"""A Flame cluster as a fleet: tasks run on executors that come and go."""
