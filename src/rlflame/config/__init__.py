"""Settings: the recipe decides the bits, the runtime decides the speed."""
