"""The class that travels to a Flame worker by value, and unpacks the modules that it needs.

Sent as text, so it imports nothing of rlflame and nothing at all when it is loaded.
"""

from __future__ import annotations

from typing import Any


class Loader:
    """What Flame instantiates once per executor; the subclass that is sent holds the two values."""

    #: A zip of the modules a worker needs.
    archive = b""
    settings: dict[str, Any] = {}  # noqa: RUF012 - replaced as a whole in the subclass

    def __init__(self) -> None:
        import atexit
        import io
        import shutil
        import sys
        import tempfile
        import zipfile

        folder = tempfile.mkdtemp(prefix="rlflame-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        zipfile.ZipFile(io.BytesIO(self.archive)).extractall(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "rlflame"]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        self._service: Any = None

    def greet(self, wait_s: float = 0.0) -> Any:
        """What this executor has installed, as bytes of JSON: asked first, and needs no package
        but flamepy.

        Who asks many executors has each wait a moment, so that no quick one answers for another.
        """
        import json
        import os
        import time

        from rlflame.rollout.machine import describe_host

        time.sleep(wait_s)
        answer = json.dumps({**describe_host(), "pid": os.getpid(), "clock": time.time()})
        return self._make_array(answer.encode())

    def ping(self) -> Any:
        """No bytes, to see how long that takes."""
        return self._make_array(b"")

    def _make_array(self, content: bytes) -> Any:
        """As `object_cache.make_array`, which cannot be imported without numpy."""
        import pyarrow as pa

        return pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])

    def run(self, tasks: Any, policy: str, endpoint: str, key: str) -> Any:
        """The bytes of tasks and where their weights lie, for the bytes of the answers."""
        if self._service is None:
            from rlflame.fleet.flame.service import Service

            self._service = Service(**self.settings)
        return self._service.run(tasks, policy, endpoint, key)
