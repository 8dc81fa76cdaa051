"""Starts, monitors and stops the processes of a multi-learner run."""
