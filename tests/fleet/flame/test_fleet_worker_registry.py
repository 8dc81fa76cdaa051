"""The registry of workers: their number, and differences from this machine."""

from __future__ import annotations

from collections.abc import Iterable

from rlflame.fleet.base import FleetEvent
from rlflame.fleet.flame.fleet import WorkerRegistry
from rlflame.rollout.machine import read_versions


class Registry:
    """A registry for two workers, with the notes for its observer."""

    def __init__(self, rooms: Iterable[int] = ()) -> None:
        self.events: list[FleetEvent] = []
        left = iter(rooms)
        self.workers = WorkerRegistry(2, lambda: next(left, 2), self.events.append)

    def add(self, name: str, **more: str) -> None:
        self.workers.add({**read_versions(), "name": name, "host": "far", **more})

    def names(self) -> list[str]:
        return [worker["name"] for worker in self.workers.list_workers()]

    def counts(self) -> list[int]:
        return [event.count for event in self.events if event.kind == "workers"]

    def notes(self) -> list[str]:
        return [event.text for event in self.events if event.kind == "note"]


def test_a_worker_that_could_not_start_a_child_is_not_compared() -> None:
    registry = Registry()
    registry.workers.add({"name": "a", "host": "far", "pid": 1, "child": 0})
    assert (registry.events, registry.names()) == ([], [])
    registry.add("a")
    assert registry.counts() == [1]


def test_of_more_workers_than_there_can_be_those_not_heard_of_for_longest_are_gone() -> None:
    registry = Registry()
    for name in ("a", "b", "a", "c", "a", "c"):
        registry.add(name)
    assert registry.names() == ["a", "c"]
    assert registry.counts() == [1, 2]
    registry.add("d", numpy="1.0.0")
    assert registry.names() == ["c", "d"]
    assert len(registry.notes()) == 1  # the new worker is compared too


def test_where_room_is_made_all_are_counted() -> None:
    """The capacity is read again only when the registry seems to be full."""
    registry = Registry([3, 1])
    for name in ("a", "b", "a", "c", "b", "c", "d", "d"):
        registry.add(name)
    assert registry.counts() == [1, 2, 3]
    assert registry.names() == ["b", "c", "d"]


def test_a_package_that_one_of_two_machines_lacks_changes_no_bit() -> None:
    registry = Registry()
    registry.add("a", box2d="absent")
    assert registry.notes() == []
    registry.add("b", mujoco="1.0.0")
    (note,) = registry.notes()
    assert note.startswith("the worker on far differs in mujoco 1.0.0 (")


def test_another_python_of_a_worker_is_noted_once() -> None:
    registry = Registry()
    for name in ("one", "two", "three"):
        registry.add(name, python="3.99.1" if name != "three" else read_versions()["python"])
    (note,) = registry.notes()
    assert note.startswith("the worker on far differs in Python 3.99 (here 3.")
