"""The state of several learners, read over the port of their rendezvous."""

from __future__ import annotations

import itertools
import os
import socket
import threading

import pytest
from meetings import HERE, hosted

from rlflame.config.flags import read_rank
from rlflame.errors import ConfigError, LearnerFailure
from rlflame.experiment.learners import liveness
from rlflame.experiment.learners.liveness import (
    LearnerProcess,
    LivenessMonitor,
    await_learners,
    make_torchrun_rendezvous,
)


class Called(LivenessMonitor):
    """A monitor whose number of exchanges the test sets."""

    def __init__(self, meeting, rank, size):
        self.exchanges, self.meeting = 0, meeting
        super().__init__(meeting, rank, size, 10.0, lambda: self.exchanges)


@pytest.fixture
def calls():
    """The monitors of three learners. The first learner has made five exchanges."""
    meeting, store = hosted(socket.create_server((HERE, 0)))
    found = [Called(meeting, rank, 3) for rank in range(3)]
    found[0].exchanges = 5
    yield found
    del store


def attended(call, exchanges):
    call.exchanges = exchanges
    answered = threading.Event()
    call.start_answering(answered.set)
    return answered


def test_only_the_silent_learner_is_late_even_if_others_are_behind(calls):
    answered = attended(calls[1], 3)
    assert calls[0].find_late_ranks(1.0) == [2]
    assert answered.wait(10.0)
    assert calls[0].read_process(2) == LearnerProcess.from_current_process()
    assert LearnerProcess.from_current_process().pid == os.getpid()


@pytest.mark.parametrize(
    ("exchanges", "meant"), [((5, 4), [2]), ((4, 4), [1, 2]), ((3, 4), [1]), ((5, 6), [])]
)
def test_where_all_answer_those_most_behind_are_meant(calls, exchanges, meant):
    for call, come in zip(calls[1:], exchanges, strict=True):
        attended(call, come)
    assert calls[0].find_late_ranks(60.0) == meant


def test_one_that_ends_by_itself_is_meant_one_that_another_takes_along_is_not(calls):
    calls[1].exchanges = 4
    calls[1].report_exit(healthy=True)
    calls[2].exchanges = 5
    calls[2].report_exit(healthy=False)
    assert calls[0].find_late_ranks(60.0) == [2]


def test_only_those_who_begin_together_answer(calls):
    """torchrun may start another group at the same port."""
    again = calls[0].meeting._replace(attempt="1")
    first, other = (Called(again, rank, 2) for rank in range(2))
    other.report_exit(healthy=True)
    assert first.find_late_ranks(60.0) == []
    assert calls[0].find_late_ranks(0.2) == [1, 2]


def test_nobody_begins_before_all_are_there(calls):
    meeting, began = calls[0].meeting, []

    def come(rank):
        await_learners(meeting, rank, 3, 60.0)
        began.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.2)  # a thread that does not wait has ended by now
        assert thread.is_alive()
    come(2)
    for thread in threads:
        thread.join()
    assert sorted(began) == [0, 1, 2]


def test_learners_that_do_not_join_are_named(calls, monkeypatch):
    monkeypatch.setattr(liveness.time, "monotonic", itertools.count(0.0, 50.0).__next__)
    with pytest.raises(LearnerFailure, match=r"60 s waiting for learners 1, 2 to join"):
        await_learners(calls[0].meeting, 0, 3, 60.0)


def test_torchrun_says_where_to_meet():
    environment = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    assert make_torchrun_rendezvous(environment) == ("first", 29500, "0")
    again = {**environment, "TORCHELASTIC_RESTART_COUNT": "2"}
    assert make_torchrun_rendezvous(again) == ("first", 29500, "2")


@pytest.mark.parametrize("odd", [{"RANK": "x"}, {"WORLD_SIZE": ""}, {"MASTER_PORT": "abc"}])
def test_what_torchrun_would_not_set_is_a_sentence(odd) -> None:
    named = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_rank(named) == (0, 2)
    with pytest.raises(ConfigError, match=next(iter(odd))) as refused:
        read_rank({**named, **odd})
    assert repr(next(iter(odd.values()))) in refused.value.message
    assert read_rank({**named, "WORLD_SIZE": "1", "MASTER_PORT": ""}) is None


@pytest.mark.parametrize("rank", ["-1", "2", "5"])
def test_a_rank_beyond_its_group_is_a_sentence(rank) -> None:
    named = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=f"RANK='{rank}', WORLD_SIZE='2'"):
        read_rank(named)
