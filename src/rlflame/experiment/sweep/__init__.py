"""Sweeps: runs of one recipe with several seeds."""
