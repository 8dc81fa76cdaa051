"""Starts, resumes and lists runs and sweeps, and compares checkpoints."""
