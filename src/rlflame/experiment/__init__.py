"""One run, or many seeds: from a config or a checkpoint to a result."""
