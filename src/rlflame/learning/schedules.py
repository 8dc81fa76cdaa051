"""What moves in the course of a training: learning rates, clip ranges, the discount.

Must not know: losses, weights.
"""

from __future__ import annotations

from rlflame.config.algorithms import PpoSettings

#: By this the learning rate moves towards a desired KL, and no further than so many times from
#: where it began: an estimate that says little would take it anywhere.
RATE_FACTOR = 1.5
RATE_SPAN = 30.0


def schedule(value: float, anneal: bool, progress: float) -> float:
    """The value itself, or its line down to zero at the horizon."""
    return value * (1.0 - min(1.0, progress)) if anneal else value


def discount_at(settings: PpoSettings, progress: float) -> float:
    """The steps that it looks ahead, 1 / (1 - discount), move in a straight line to the horizon.

    They stay where they are until the line begins.
    """
    begins = settings.discount_moves_from
    if settings.final_discount is None or progress <= begins:
        return settings.discount
    first, last = 1.0 / (1.0 - settings.discount), 1.0 / (1.0 - settings.final_discount)
    moved = min(1.0, (progress - begins) / (1.0 - begins))
    return 1.0 - 1.0 / (first + (last - first) * moved)


def rate_after(rate: float, kl: float | None, settings: PpoSettings) -> float:
    """The next batch's learning rate: shorter steps where the policy moved too far, or longer."""
    wanted, began = settings.desired_kl, settings.learning_rate
    if wanted is None or kl is None:
        return rate
    if kl > 2.0 * wanted:
        return max(rate / RATE_FACTOR, began / RATE_SPAN)
    if kl < 0.5 * wanted:
        return min(rate * RATE_FACTOR, began * RATE_SPAN)
    return rate
