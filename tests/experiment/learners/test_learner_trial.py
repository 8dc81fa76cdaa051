"""The trial that finds the fastest number of learners."""

from __future__ import annotations

import pytest

from rlflame.experiment.learners.learner_trial import LearnerTrial


def run_trial(costs_s: dict[int, float], updates: int = 10) -> tuple[LearnerTrial, list[int]]:
    """Run a trial in which a batch costs this much; return the sizes in the order of their use."""
    trial, size, order = LearnerTrial(), max(costs_s), []
    while True:
        while not trial.is_complete(size):
            number = 1 if trial.is_alone_due(size) else size
            order.append(number)
            trial.add(number, costs_s[number] * updates, updates)
        chosen = trial.choose_next(size, (size + 1) // 2 if size > 2 else 1)
        if chosen in trial.compute_times():
            return trial, [*order, chosen]
        size = chosen


@pytest.mark.parametrize(
    ("costs_s", "fastest"),
    [
        ({2: 1.0, 1: 3.0}, 2),
        ({2: 3.0, 1: 1.0}, 1),
        ({2: 1.0, 1: 1.0}, 1),
        ({8: 4.0, 4: 2.0, 2: 3.0, 1: 5.0}, 4),
        ({8: 1.0, 4: 2.0, 2: 3.0, 1: 5.0}, 8),
        ({8: 2.0, 4: 3.0, 2: 1.0, 1: 5.0}, 2),
        ({3: 2.0, 2: 1.0, 1: 5.0}, 2),
        ({8: 9.0, 4: 8.0, 2: 7.0, 1: 5.0}, 1),
        ({8: 9.0, 4: 8.0, 2: 4.0, 1: 5.0}, 2),
    ],
)
def test_the_fastest_number_of_learners_is_chosen(costs_s, fastest):
    assert run_trial(costs_s)[1][-1] == fastest


def test_all_learners_and_one_alternate_and_smaller_groups_follow():
    order = run_trial({8: 4.0, 4: 2.0, 2: 3.0, 1: 5.0})[1]
    assert order[:-1] == [8, 1, 8, 1, 8, 1, 4, 4, 4, 2, 2, 2]


def test_batches_are_compared_by_the_time_of_an_optimizer_step():
    """The KL limit ends some batches early."""
    trial = LearnerTrial()
    trial.add(2, 0.010, 0)
    for seconds, updates in ((1.0, 100), (0.5, 50), (0.01, 1)):
        trial.add(2, seconds, updates)
    for _ in range(3):
        trial.add(1, 0.04, 2)
    assert trial.is_complete(2)
    assert trial.compute_times() == {1: 0.02, 2: 0.01}
    assert trial.choose_next(2, 1) == 2
