"""Environments: how they are made, stepped together, saved and restored."""
