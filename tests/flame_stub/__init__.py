"""A Flame v0.6.0 in one Python process, for tests: real wire protocols, real worker processes.

Must not know: rlflame. Everything it promises is what the unmodified flamepy client can see.
"""

from flame_stub.cluster import FlameStub
from flame_stub.faults import Faults

__all__ = ["Faults", "FlameStub"]
