"""Settings: the recipe determines the result, and the runtime affects only the speed."""
