"""What a job's seeds have come to, each by itself and together, read from their folders.

P2 and P4 are two protocols under which returns are published: the best mean over seeds that any
evaluation in training had, and the mean of the last twentieth of these evaluations. Neither may be
held against the other. Must not know: processes, display.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlflame.analysis.curves import EVALUATION
from rlflame.errors import CheckpointError
from rlflame.experiment.sweep.job import Job, Standing, standing
from rlflame.rollout.spec import Float64
from rlflame.statistics import best_mean, over, summarise, tail_mean
from rlflame.storage import run_reader
from rlflame.storage.sweep_result import Outcome, SeedResult, Summary


def summary(folder: Path, job: Job, outcomes: Mapping[int, Outcome] | None = None) -> Summary:
    found = [standing(folder, job, seed) for seed in job.seeds]
    curves = {one.seed: _curve(one.folder) for one in found if one.begun}
    results = tuple(
        _result(one, curves.get(one.seed), (outcomes or {}).get(one.seed)) for one in found
    )
    scored = [result for result in results if result.evaluation is not None]
    finals = np.array([_mean(result) for result in scored], np.float64)
    lines = [curves[result.seed] for result in scored]
    tails = [result.last_evaluations for result in scored]
    learning = job.config.learning
    return Summary(
        environment=learning.environment.id,
        algorithm=learning.algorithm,
        seeds=results,
        final=summarise(finals) if scored else None,
        worst_seed=scored[int(finals.argmin())].seed if scored else None,
        # Of all that were scored or of none: a seed whose record is damaged is not left out unsaid.
        p2=best_mean([line for line in lines if line is not None]) if None not in lines else None,
        p4=over(np.array(tails, np.float64)) if scored and None not in tails else None,
    )


def _mean(result: SeedResult) -> float:
    assert result.evaluation is not None
    return float(result.evaluation["mean"])


def _curve(folder: Path) -> tuple[Float64, Float64] | None:
    """Steps and returns of the evaluations in training."""
    try:
        return run_reader.read(folder).values(EVALUATION)
    except CheckpointError:
        return None


def _result(
    one: Standing, curve: tuple[Float64, Float64] | None, outcome: Outcome | None
) -> SeedResult:
    error = outcome.error if outcome is not None else None
    found = one.found
    state = "finished" if one.over else "failed" if error is not None else "stopped"
    said = error.message if error is not None else ""
    if found is None:
        state = state if one.begun or error is not None else "waiting"
        return SeedResult(one.seed, one.folder, state, error=said)
    return SeedResult(
        seed=one.seed,
        folder=one.folder,
        state=state,
        steps=found.progress.steps,
        iterations=found.progress.iteration,
        episodes=found.progress.episodes,
        evaluation=found.evaluation.as_dict() if one.over and found.evaluation else None,
        best_return=found.best.mean if found.best else None,
        last_evaluations=tail_mean(curve[1]) if curve is not None and len(curve[1]) else None,
        state_digest=found.state_digest,
        digest=found.digest,
        error=said,
    )
