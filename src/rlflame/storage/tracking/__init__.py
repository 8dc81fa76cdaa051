"""Writes metrics in the formats of other tools, with one module per tool."""
