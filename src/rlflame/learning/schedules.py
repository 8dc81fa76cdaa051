"""What moves in the course of a training: learning rates, clip ranges, the discount.

Must not know: losses, weights.
"""

from __future__ import annotations

from rlflame.config.algorithms import PpoSettings


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
