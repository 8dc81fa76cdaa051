"""The check of a Flame cluster: what works, what does not, and what to type."""
