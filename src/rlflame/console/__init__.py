"""Terminal output of runs, sweeps and commands."""
