"""Settings: the recipe that decides the bits, the runtime that decides the speed, and presets."""
