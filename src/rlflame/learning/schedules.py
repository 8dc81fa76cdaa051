"""What moves in the course of a training: learning rates, clip ranges, the discount.

Must not know: losses, weights.
"""

from __future__ import annotations

from rlflame.config.algorithms import PpoSettings

#: By this the learning rate moves towards a desired KL, and no further than so many times from
#: where it began: an estimate that says little would take it anywhere.
RATE_FACTOR = 1.5
RATE_SPAN = 30.0


def apply_schedule(value: float, anneal: bool, progress: float) -> float:
    """The value itself, or its line down to zero at the horizon."""
    return value * (1.0 - min(1.0, progress)) if anneal else value


def compute_discount(settings: PpoSettings, progress: float) -> float:
    """The steps that it looks ahead, 1 / (1 - discount), move in a straight line to the horizon.

    They stay where they are until the line begins.
    """
    start = settings.discount_moves_from
    if settings.final_discount is None or progress <= start:
        return settings.discount
    first, last = 1.0 / (1.0 - settings.discount), 1.0 / (1.0 - settings.final_discount)
    fraction = min(1.0, (progress - start) / (1.0 - start))
    return 1.0 - 1.0 / (first + (last - first) * fraction)


def adapt_learning_rate(rate: float, kl: float | None, settings: PpoSettings) -> float:
    """The next batch's learning rate: shorter steps where the policy moved too far, or longer."""
    desired_kl, initial_rate = settings.desired_kl, settings.learning_rate
    if desired_kl is None or kl is None:
        return rate
    if kl > 2.0 * desired_kl:
        return max(rate / RATE_FACTOR, initial_rate / RATE_SPAN)
    if kl < 0.5 * desired_kl:
        return min(rate * RATE_FACTOR, initial_rate * RATE_SPAN)
    return rate
