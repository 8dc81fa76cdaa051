"""Sweeps: several seeds of one recipe as one job."""
