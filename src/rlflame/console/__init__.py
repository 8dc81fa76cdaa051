"""The terminal: what it shows of runs and sweeps, and how commands print."""
