"""Starts, monitors and ends the processes of a run with several learners."""
