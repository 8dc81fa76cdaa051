"""Settings: the recipe determines the result, the runtime only the speed."""
