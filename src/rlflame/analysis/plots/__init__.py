"""Charts of curves and bars, as images and as text for a terminal."""
