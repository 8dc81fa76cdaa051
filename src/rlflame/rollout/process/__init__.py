"""Child processes: how they are started, what is exchanged with them, how they end."""
