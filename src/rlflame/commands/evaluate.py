"""`rlflame eval`. Must not know: how episodes are run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlflame.commands.options import Debug, Fleet, Json, Local, Workers


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint or policy file.")],
    episodes: Annotated[int, typer.Option(help="How many episodes.", min=1)] = 100,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the best.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Episode seeds are derived from it.", min=0)] = 0,
    min_return: Annotated[
        float | None, typer.Option(help="Exit 1 unless the mean return reaches this.")
    ] = None,
    workers: Workers = None,
    fleet: Fleet = None,
    local: Local = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a policy over episodes that are always the same."""
    from rlflame import settings

    flags = settings.runtime_flags(
        workers=workers, fleet=fleet, local=local, out=None, debug=debug,
        json_lines=False, quiet=False, plain=False,
    )  # fmt: skip
    settings.limit_threads(1)
    runtime = settings.runtime_of(flags)
    import json

    from rlflame import api, checkpoint
    from rlflame.display import say
    from rlflame.errors import RlflameError
    from rlflame.evaluate import EvaluationPlan

    source = checkpoint.load(file)
    limit = source.recipe.evaluation.max_episode_steps
    record = api.evaluate(source, EvaluationPlan(episodes, seed, stochastic, limit), runtime)
    if as_json:
        say(json.dumps(record.as_dict()))
    else:
        say(
            f"{record.mean:.1f}, 95% interval [{record.low:.1f}, {record.high:.1f}] "
            f"over {record.episodes} episodes"
        )
    if min_return is not None and record.mean < min_return:
        raise RlflameError(f"The mean return {record.mean:.1f} is below {min_return:g}.")
