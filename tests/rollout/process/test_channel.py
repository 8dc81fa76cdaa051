"""Two ends of a channel in one process: order, sizes, closing, bad messages."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rlflame.rollout.process.channel import (
    Channel,
    MessageKind,
    ProtocolError,
    WakePipe,
    wait,
)

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one_reads, other_writes = os.pipe()
    other_reads, one_writes = os.pipe()
    ends = Channel(one_reads, one_writes), Channel(other_reads, other_writes)
    yield ends
    for end in ends:
        end.close()


def test_messages_come_in_their_order_with_their_values(ends: Ends) -> None:
    one, other = ends
    assert not other.poll()
    one.send(MessageKind.ORDER, {"a": 1})
    one.send(MessageKind.STOP)
    assert other.poll()
    assert [(message.kind, message.value) for message in other.receive_all()] == [
        (MessageKind.ORDER, {"a": 1}),
        (MessageKind.STOP, None),
    ]
    assert other.receive_all() == []
    with pytest.raises(TimeoutError):
        other.receive(0.0)


def test_what_is_longer_than_a_pipe_waits_for_room_and_arrives_whole(ends: Ends) -> None:
    one, other = ends
    array = np.arange(500_000.0)
    one.send(MessageKind.POLICY, {"arrays": {"x": array}})
    assert one.has_backlog
    reader = threading.Thread(target=lambda: values.append(other.receive(60.0).value))
    values: list[object] = []
    reader.start()
    while one.has_backlog:
        wait([one], 60.0)
    reader.join(60.0)
    assert not one.has_backlog
    (value,) = values
    assert isinstance(value, dict)
    np.testing.assert_array_equal(value["arrays"]["x"], array)


def test_two_ends_that_both_send_more_than_a_pipe_holds_do_not_block(ends: Ends) -> None:
    payload = bytes(3 << 20)
    for end in ends:
        end.send_bytes(MessageKind.RESULT, payload)
    received: list[Channel] = []
    while len(received) < 2:
        for end in wait(ends, 60.0):
            received += [end for _ in end.receive_all()]
    assert {*received} == {*ends}


def test_the_end_comes_behind_the_last_message_and_stays(ends: Ends) -> None:
    one, other = ends
    one.send(MessageKind.HELLO, "x")
    one.close()
    assert [message.value for message in other] == ["x"]
    for receive in (other.receive, other.receive_all):
        with pytest.raises(EOFError):
            receive()
    other.send(MessageKind.HELLO, "nobody reads this")
    assert not other.has_backlog


def test_messages_before_bytes_that_are_none_are_received_first(ends: Ends) -> None:
    one, other = ends
    one.send(MessageKind.RESULT, 1)
    os.write(one.pipes[1], struct.pack("<BQ", 255, 0))
    assert [message.value for message in other.receive_all()] == [1]
    with pytest.raises(ProtocolError):
        other.receive_all()


def test_a_header_that_is_none_is_refused_without_waiting_for_a_payload(ends: Ends) -> None:
    one, other = ends
    os.write(one.pipes[1], struct.pack("<BQ", 255, 0))
    with pytest.raises(ProtocolError):
        other.receive(timeout_s=60.0)


def test_bytes_that_are_no_message_are_refused(ends: Ends) -> None:
    one, other = ends
    one.send_bytes(MessageKind.RESULT, b"no value")
    with pytest.raises(ProtocolError, match="a damaged frame"):
        _ = other.receive().value
    os.write(one._write_fd, struct.pack("<BQ", 255, 3) + b"abc")
    with pytest.raises(ProtocolError, match="a frame of unknown kind 255"):
        other.receive_all()
    with pytest.raises(EOFError):
        other.receive()


def test_a_message_that_comes_after_the_end_of_sending_reaches_no_other_file(
    ends: Ends, tmp_path: object
) -> None:
    one, _ = ends
    number = one._write_fd
    one.close_sending()
    other_file = os.open(f"{tmp_path}/file", os.O_CREAT | os.O_WRONLY)
    assert other_file == number
    one.send(MessageKind.RESULT, "late")
    os.close(other_file)
    assert os.path.getsize(f"{tmp_path}/file") == 0


def test_a_wake_ends_a_wait_and_a_late_one_reaches_no_other_file(
    ends: Ends, tmp_path: object
) -> None:
    wake_pipe = WakePipe()
    wake_pipe.wake()
    assert wait(ends, 60.0, wake_pipe) == []
    assert wait(ends, 0.0, wake_pipe) == []
    wake_pipe.close()
    with open(f"{tmp_path}/one", "wb") as one, open(f"{tmp_path}/other", "wb") as other:
        wake_pipe.wake()
    assert one.name != other.name
    assert [os.path.getsize(file.name) for file in (one, other)] == [0, 0]
