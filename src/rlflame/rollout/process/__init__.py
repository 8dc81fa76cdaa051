"""Starts and ends child processes, and exchanges messages with them."""
