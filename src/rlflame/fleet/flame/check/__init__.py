"""`rlflame cluster-check`: diagnoses a Flame cluster and suggests fixes."""
