"""A malicious worker or client of the cache: pickles, addresses, foreign keys.

The driver must not unpickle data from the cluster, must not connect to an address that a worker
names, and must not read or delete objects of another session.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import flames
import numpy as np
import pytest
from flame_stub import FlameStub
from test_base_contract import slots
from test_cluster_check_on_stub import PATIENT, examine, finding
from test_flame_fleet import Bench, expected, run

from rlflame.errors import FleetError
from rlflame.fleet.flame import object_cache
from rlflame.fleet.flame.object_cache import make_array, read_object
from rlflame.rollout import wire

#: The mark of flamepy's own pickles. flamepy also unpickles data without a mark.
PICKLE_MARKS = {"marked": b"FLM\x00", "bare": b""}


class Payload:
    """Runs a command in any process that unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with FlameStub(executors=1) as stub:
        yield Bench(stub)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The file that appears if a payload is unpickled."""
    return tmp_path / "unpickled"


@pytest.fixture(params=PICKLE_MARKS.values(), ids=PICKLE_MARKS.keys())
def payload(request: pytest.FixtureRequest, trace: Path) -> bytes:
    return bytes(request.param + pickle.dumps(Payload(trace)))


class Session:
    """The parts of a session that determine whether a reference is valid."""

    application, id = "a", "b"


def encode_reference(endpoint: str, key: str) -> bytes:
    return bson.encode({"endpoint": endpoint, "key": key, "version": 1})


def cache_of(stub: FlameStub) -> str:
    return stub.environment()["FLAME_CACHE_ENDPOINT"]


def forge_times(times: int, forge: Callable[[str, bytes], bytes]) -> Callable[[str, bytes], bytes]:
    """Forge this number of outputs, and return later ones unchanged."""
    left = [times]

    def forge_some(prefix: str, output: bytes) -> bytes:
        left[0] -= 1
        return forge(prefix, output) if left[0] >= 0 else output

    return forge_some


def forge_pickle(stub: FlameStub, payload: bytes) -> Callable[[str, bytes], bytes]:
    def forge(prefix: str, output: bytes) -> bytes:
        key = f"{prefix}/forged"
        stub.store(key, payload)
        return encode_reference(cache_of(stub), key)

    return forge


def test_the_payload_works(trace: Path, bench: Bench) -> None:
    """Without a payload that works, the tests below would always pass."""
    from flamepy.core import ObjectRef, get_object

    flames.settle(bench.stub.environment())
    bench.stub.store("app/session/object", pickle.dumps(Payload(trace)))
    get_object(ObjectRef(cache_of(bench.stub), "app/session/object", 0))
    assert trace.exists()


def test_a_pickled_answer_is_not_unpickled(bench: Bench, payload: bytes, trace: Path) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.faults.forge_output = forge_times(2, forge_pickle(bench.stub, payload))
        assert run(fleet, slots(2)) == expected(slots(2))
        assert len(bench.kinds("retried")) >= 1
    assert not trace.exists()


def test_a_pickled_first_answer_is_not_unpickled(bench: Bench, payload: bytes, trace: Path) -> None:
    bench.stub.faults.forge_output = forge_pickle(bench.stub, payload)
    with bench.fleet(1) as fleet, pytest.raises(FleetError) as caught:
        run(fleet, slots(1))
    assert "cluster-check" in caught.value.hint
    assert not trace.exists()


@pytest.mark.parametrize("honest", [0, 1, 5])
def test_cluster_check_does_not_unpickle_answers(
    bench: Bench, payload: bytes, trace: Path, honest: int
) -> None:
    """Answers to the greetings (first and later ones) and to small tasks."""
    forge, seen = forge_pickle(bench.stub, payload), []

    def forge_late(prefix: str, output: bytes) -> bytes:
        seen.append(prefix)
        return output if len(seen) <= honest else forge(prefix, output)

    flames.settle(bench.stub.environment())
    bench.stub.faults.forge_output = forge_late
    diagnosis = examine(PATIENT, workers=1)
    assert finding(diagnosis, "probe").status == "failed"
    assert diagnosis.exit_code == 1
    assert not trace.exists()


def test_a_pickled_lease_is_not_unpickled(bench: Bench, payload: bytes, trace: Path) -> None:
    flames.settle(bench.stub.environment())
    bench.stub.store(object_cache.make_lease_key("rlflame-dead"), payload)
    with pytest.raises(FleetError):
        object_cache.read_lease(object_cache.make_lease_key("rlflame-dead"))
    assert not trace.exists()


def test_an_address_in_an_answer_is_not_called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_TRANSFER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        elsewhere = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        forged = []

        def forge(prefix: str, output: bytes) -> bytes:
            forged.append(prefix)
            return encode_reference(elsewhere, bson.decode(output)["key"])

        bench.stub.faults.forge_output = forge
        with bench.fleet(1) as fleet:
            assert run(fleet, slots(2)) == expected(slots(2))
            assert not bench.kinds("retried")
        assert forged
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_object_of_others_is_neither_read_nor_deleted(bench: Bench) -> None:
    from flamepy.core import put_object

    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        content = wire.encode({"worker": {}, "answers": []})
        theirs = put_object("others/shared", np.frombuffer(content, np.uint8)).key

        def forge(prefix: str, output: bytes) -> bytes:
            return encode_reference(cache_of(bench.stub), theirs)

        bench.stub.faults.forge_output = forge_times(2, forge)
        assert run(fleet, slots(2)) == expected(slots(2))
    assert theirs in bench.stub.objects()


@pytest.mark.parametrize(
    "key", ["a/other/object", "a/b", "a/b/*", "a/*", "a/b/../c", "a/b/x:1", "other/b/object", ""]
)
def test_a_key_outside_the_session_is_refused(key: str) -> None:
    with pytest.raises(FleetError):
        object_cache.parse_reference(encode_reference("grpc://127.0.0.1:1", key), Session())


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"\x80\x04.",
        bson.encode({"endpoint": 1, "key": 2}),
        bson.encode({"endpoint": "grpc://a:1; rm x", "key": "a/b/c", "version": 1}),
    ],
)
def test_an_answer_that_is_no_reference_is_refused(output: bytes) -> None:
    with pytest.raises(FleetError):
        object_cache.parse_reference(output, Session())


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 5000])
def test_bytes_come_back_from_the_cache_as_they_were(bench: Bench, content: bytes) -> None:
    flames.settle(bench.stub.environment())
    place = object_cache.put("app/shared", content)
    assert bytes(object_cache.get(place.key)) == content
    object_cache.delete(place.key)
    with pytest.raises(KeyError):
        object_cache.get(place.key)


def test_damaged_objects_are_refused(bench: Bench) -> None:
    """Damage each byte in turn. The reader returns only what Arrow cannot detect."""
    from flamepy.core.cache import _serialize_object_data

    flames.settle(bench.stub.environment())
    good = _serialize_object_data(make_array(b"x" * 100))
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 0xFF
        bench.stub.store("app/shared/bad", bytes(bad))
        try:
            content = read_object(cache_of(bench.stub), "app/shared/bad")
        except FleetError:
            continue
        assert len(content) <= len(good)
    for length in range(len(good)):
        bench.stub.store("app/shared/short", good[:length])
        try:
            assert len(read_object(cache_of(bench.stub), "app/shared/short")) <= length
        except FleetError:
            continue


def test_executors_read_the_lease_where_the_cache_says_that_it_is(bench: Bench) -> None:
    """The driver's address of the cache may be unreachable from a container."""
    flames.settle(bench.stub.environment())
    bench.stub.faults.reference_endpoint = "grpc://192.0.2.1:9090"
    kept = object_cache.Lease("rlflame-x")
    try:
        assert kept.reference["endpoint"] == "grpc://192.0.2.1:9090"
        assert object_cache.read_lease(kept.reference["key"])
    finally:
        kept.close()
