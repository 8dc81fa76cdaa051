"""Environments that workers step: how they are made, stepped together, saved and restored."""
