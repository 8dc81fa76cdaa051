"""Runs the updates of a device on the CPU as a GPU runs them before it captures a graph."""

from __future__ import annotations

from rlflame.learning.device.graph import warm_up


def run_after_warm_up(graph, function, state) -> None:
    """Replace `UpdateGraph.run`: warm up before the first run of a graph."""
    if graph._graph is None:
        graph._graph = "warm"
        warm_up(function, state)
    function()
