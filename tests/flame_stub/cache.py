"""The object cache: versioned objects in memory, and their Arrow Flight server.

This module does not know sessions, tasks or applications. Objects have keys APP/SESSION/ID.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import bson
import pyarrow as pa
import pyarrow.flight as flight

from flame_stub.faults import Faults

NATIVE = b"flame.cache.format"
VERSION = b"flame.cache.version"
ROWS = pa.schema([("version", pa.uint64()), ("kind", pa.string()), ("data", pa.binary())])


@dataclass
class CachedObject:
    """Bytes with patches, or a table with its own schema."""

    version: int
    data: bytes | pa.Table
    patches: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        own = self.data.nbytes if isinstance(self.data, pa.Table) else len(self.data)
        return own + sum(len(data) for _, data in self.patches)

    @property
    def current(self) -> int:
        return max([self.version, *(version for version, _ in self.patches)])

    def rows(self, known: int) -> pa.Table:
        """The data that a client with version `known` lacks: none, patches, or all."""
        if known == self.current:
            return ROWS.empty_table()
        if isinstance(self.data, pa.Table):
            metadata = self.data.schema.metadata | {VERSION: str(self.version).encode()}
            return self.data.replace_schema_metadata(metadata)
        rows = [(version, "patch", data) for version, data in self.patches if version > known]
        if known < self.version:
            rows.insert(0, (self.version, "base", self.data))
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        arrays = [pa.array(list(c), f.type) for c, f in zip(columns, ROWS, strict=True)]
        return pa.table(arrays, schema=ROWS)


class Store:
    """The objects. They survive a restart of the server."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._objects: dict[str, CachedObject] = {}

    def put(self, key: str, data: bytes | pa.Table) -> int:
        with self._lock:
            known = self._objects.get(key)
            version = known.current + 1 if known else 1
            self._objects[key] = CachedObject(version, data)
            return version

    def patch(self, key: str, data: bytes) -> int:
        with self._lock:
            if key not in self._objects:
                raise KeyError(f"object <{key}> not found for patch")
            known = self._objects[key]
            known.patches.append((known.current + 1, data))
            return known.current

    def rows(self, key: str, known: int) -> pa.Table:
        with self._lock:
            aimed_at = key in self._objects and key.startswith(self._faults.cache_missing_prefix)
            if key not in self._objects or (aimed_at and self._faults.take("cache_missing")):
                raise KeyError(f"object <{key}> not found")
            return self._objects[key].rows(known)

    def delete(self, prefix: str) -> None:
        """Delete `APP/SESSION/ID`, `APP/SESSION` or `APP/*`. Nothing has to match."""
        start = prefix.removesuffix("*") if prefix.endswith("/*") else f"{prefix}/"
        with self._lock:
            for key in [k for k in self._objects if k == prefix or k.startswith(start)]:
                del self._objects[key]

    def clear(self) -> None:
        with self._lock:
            self._objects.clear()

    def sizes(self) -> dict[str, int]:
        with self._lock:
            return {key: found.size_bytes for key, found in self._objects.items()}


class CacheServer(flight.FlightServerBase):
    """The operations of Flame's object cache: put, replace, patch, get, delete."""

    def __init__(self, store: Store, faults: Faults, port: int = 0) -> None:
        super().__init__(f"grpc://127.0.0.1:{port}")
        self._store = store
        self._faults = faults

    @property
    def endpoint(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        table = reader.read_all()
        native = NATIVE in (table.schema.metadata or {})
        if not table.num_rows and not native:
            raise pa.ArrowInvalid("No data received")
        data = table if native else b"".join(table.column("data").to_pylist())
        if descriptor.command:
            verb, _, key = descriptor.command.decode().partition(":")
            if verb != "PATCH" or native:
                raise pa.ArrowInvalid(f"Invalid command: {verb}")
            version = self._store.patch(checked(key, (3,)), data)
        else:
            key = checked(descriptor.path[0].decode(), (2, 3))
            if key.count("/") == 1:
                key = f"{key}/{uuid.uuid4()}"
            version = self._store.put(key, data)
        endpoint = self._faults.reference_endpoint or self.endpoint
        reference = {"endpoint": endpoint, "key": key, "version": version}
        writer.write(pa.py_buffer(bson.encode(reference)))

    def do_get(self, context: Any, ticket: Any) -> flight.RecordBatchStream:
        key, _, known = ticket.ticket.decode().partition(":")
        rows = self._store.rows(checked(key, (3,)), int(known or 0))
        return flight.RecordBatchStream(rows)

    def do_action(self, context: Any, action: Any) -> Iterator[flight.Result]:
        if action.type != "DELETE":
            raise pa.ArrowInvalid(f"Unknown action: {action.type}")
        self._store.delete(checked(action.body.to_pybytes().decode(), (2, 3)))
        yield flight.Result(pa.py_buffer(b"OK"))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [("DELETE", "Delete objects by key or prefix")]

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        endpoints = [flight.FlightEndpoint(b"", [self.endpoint])]
        return flight.FlightInfo(ROWS, descriptor, endpoints, -1, -1)


def checked(key: str, lengths: tuple[int, ...]) -> str:
    parts = key.split("/")
    bad = [part for part in parts if not part or ".." in part or "\\" in part]
    if len(parts) not in lengths or bad:
        raise pa.ArrowInvalid(f"Invalid key '{key}': expected '<app>/<ssn>/<uuid>'")
    return key


class Cache:
    """The store with its server, which can stop and start again at the same address."""

    def __init__(self, faults: Faults) -> None:
        self.store = Store(faults)
        self._faults = faults
        self._server: CacheServer | None = CacheServer(self.store, faults)
        self._port = self._server.port

    @property
    def endpoint(self) -> str:
        return f"grpc://127.0.0.1:{self._port}"

    def start(self, lose: bool = False) -> None:
        if lose:
            self.store.clear()
        self._server = self._server or CacheServer(self.store, self._faults, self._port)

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()

    def fetch(self, endpoint: str, key: str) -> bytes:
        """The bytes that an executor manager downloads for `key` from `endpoint`."""
        if endpoint != self.endpoint or self._server is None:
            raise ConnectionError("failed to connect to cache: transport error")
        try:
            rows = self.store.rows(key, 0)
        except KeyError as error:
            raise ConnectionError(f"do_get failed: {error.args[0]}") from None
        return b"".join(rows.column("data").to_pylist())
