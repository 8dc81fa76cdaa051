"""Run folders read for charts and reports: curves, groups of runs, smoothing."""
