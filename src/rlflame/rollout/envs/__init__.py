"""Makes environments, steps them together, and saves and restores their states."""
