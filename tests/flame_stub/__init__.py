"""Flame v0.6.0 in one process for tests, with real protocols and workers.

The stub does not know rlflame. The unmodified flamepy client defines the behaviour to imitate.
"""

from flame_stub.cluster import FlameStub
from flame_stub.faults import Faults

__all__ = ["Faults", "FlameStub"]
