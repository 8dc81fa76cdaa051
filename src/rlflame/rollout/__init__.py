"""Everything that a worker imports: numpy and gymnasium, and nothing else of rlflame."""
