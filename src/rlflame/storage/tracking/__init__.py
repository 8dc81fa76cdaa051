"""Sinks that write metrics in the formats of other tools, one module per tool."""
