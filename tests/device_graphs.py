"""Runs the updates of a device on the CPU as a GPU runs them before it captures a graph."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from rlflame.learning.device.graph import warm_up

#: Parts of the names of operations that a CUDA graph cannot capture, because the CPU reads their
#: result or, if they are deterministic, copies numbers to the GPU.
REFUSED = (
    "scatter",
    "index_put",
    "index_copy",
    "local_scalar",
    "nonzero",
    "masked_select",
    "unique",
    "item",
)


def run_after_warm_up(graph, function, state) -> None:
    """Replace `UpdateGraph.run`: warm up before the first run of a graph."""
    if graph._graph is None:
        graph._graph = "warm"
        warm_up(function, state)
    function()


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


def refuse_uncaptured(graph, function, state) -> None:
    """Replace `UpdateGraph.run`: raise an error for an operation that cannot be captured."""
    with _Names() as names:
        function()
    wrong = {name for name in names.seen for part in REFUSED if part in name}
    assert len(names.seen) > 30
    assert not wrong
