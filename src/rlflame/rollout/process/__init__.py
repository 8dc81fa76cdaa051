"""Child processes: how they start, exchange messages and end."""
