"""Trackers beside the run folder, one file each."""
