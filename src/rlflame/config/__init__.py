"""Settings: the recipe determines the result, and the runtime only the speed."""
