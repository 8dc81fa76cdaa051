"""The results of a sweep's seeds, each by itself and together, read from their folders.

P2 and P4 are two protocols under which returns are published: the best mean over seeds that any
evaluation in training had, and the mean of the last twentieth of these evaluations. They cannot be
compared with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlflame.analysis.curves import EVALUATION
from rlflame.errors import CheckpointError
from rlflame.experiment.sweep.job import SeedStatus, Sweep, read_seed_statuses
from rlflame.rollout.spec import Float64
from rlflame.statistics import compute_mean_std, compute_tail_mean, find_best_mean, summarise
from rlflame.storage import run_reader
from rlflame.storage.sweep_result import SeedOutcome, SeedResult, SweepSummary


def summarise_sweep(
    folder: Path, sweep: Sweep, outcomes: Mapping[int, SeedOutcome] | None = None
) -> SweepSummary:
    statuses = read_seed_statuses(folder, sweep)
    curves = {status.seed: _read_curve(status.folder) for status in statuses if status.started}
    results = tuple(
        _make_seed_result(status, curves.get(status.seed), (outcomes or {}).get(status.seed))
        for status in statuses
    )
    scored = [result for result in results if result.evaluation is not None]
    finals = np.array([_get_mean(result) for result in scored], np.float64)
    scored_curves = [curves[result.seed] for result in scored]
    tails = [result.last_evaluations for result in scored]
    learning = sweep.config.learning
    return SweepSummary(
        environment=learning.environment.id,
        algorithm=learning.algorithm,
        seeds=results,
        final=summarise(finals) if scored else None,
        worst_seed=scored[int(finals.argmin())].seed if scored else None,
        # Of all that were scored or of none: a seed whose record is damaged is not left out unsaid.
        p2=find_best_mean([line for line in scored_curves if line is not None])
        if None not in scored_curves
        else None,
        p4=compute_mean_std(np.array(tails, np.float64)) if scored and None not in tails else None,
    )


def _get_mean(result: SeedResult) -> float:
    assert result.evaluation is not None
    return float(result.evaluation["mean"])


def _read_curve(folder: Path) -> tuple[Float64, Float64] | None:
    """Steps and returns of the evaluations in training."""
    try:
        return run_reader.read_run(folder).read_values(EVALUATION)
    except CheckpointError:
        return None


def _make_seed_result(
    status: SeedStatus, curve: tuple[Float64, Float64] | None, outcome: SeedOutcome | None
) -> SeedResult:
    error = outcome.error if outcome is not None else None
    checkpoint = status.checkpoint
    state = "finished" if status.finished else "failed" if error is not None else "stopped"
    message = error.message if error is not None else ""
    if checkpoint is None:
        state = state if status.started or error is not None else "waiting"
        return SeedResult(status.seed, status.folder, state, error=message)
    return SeedResult(
        seed=status.seed,
        folder=status.folder,
        state=state,
        steps=checkpoint.progress.steps,
        iterations=checkpoint.progress.iteration,
        episodes=checkpoint.progress.episodes,
        evaluation=checkpoint.evaluation.as_dict()
        if status.finished and checkpoint.evaluation
        else None,
        best_return=checkpoint.best.mean if checkpoint.best else None,
        last_evaluations=compute_tail_mean(curve[1])
        if curve is not None and len(curve[1])
        else None,
        state_digest=checkpoint.state_digest,
        digest=checkpoint.digest,
        error=message,
    )
