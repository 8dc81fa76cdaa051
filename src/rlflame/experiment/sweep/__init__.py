"""Runs sweeps, which train one recipe with several seeds."""
