"""Trains and evaluates policies, and handles stop requests."""
