"""rlflame: reinforcement learning from one command, with the same result to the last bit."""

__version__ = "0.1.0"
