"""rlflame: reinforcement learning from one command, with bit-identical results."""

__version__ = "0.1.0"
