"""Settings: the recipe determines the result; the runtime does not affect it."""
