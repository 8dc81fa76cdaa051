"""Charts of curves, as pictures and in a terminal."""
