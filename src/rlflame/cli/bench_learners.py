"""`rlflame bench learners`. Must not know: how anything is timed or worded."""

from __future__ import annotations

from typing import Annotated

import typer

from rlflame.cli.bench import Algo, Out, Preset, parse_counts, parse_folder
from rlflame.cli.options import Debug, Json, Sets

#: PPO's updates where they are large enough to be worth sharing.
LARGE_UPDATES = (
    "network.hidden=[256,256]",
    "ppo.minibatch_size=8192",
    "rollout.num_slots=8",
    "rollout.envs_per_slot=8",
    "rollout.steps=256",
)


def learners(
    learners: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of learners, in turn.")
    ] = "1,2",
    env: Annotated[
        str, typer.Option(metavar="ENV", help="An alias of `rlflame envs`, or an id.")
    ] = "hopper",
    algo: Algo = None,
    preset: Preset = None,
    iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of each run, after one to warm up.")
    ] = 2,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each, in turn.")] = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same training with several numbers of learners.

    An update's computing and exchanging apart. PPO is measured where it is most of the work:
    256x256 units and minibatches of 8,192 samples, unless --set says otherwise.
    """
    from rlflame.config.recipe import DEFAULT_SHARDS
    from rlflame.experiment import run_settings

    run_settings.limit_threads(1)
    from rlflame.bench import run, workloads
    from rlflame.bench.learners import find_shard_count

    counts = parse_counts(learners, [], "--learners")
    fixed = [f"learning.gradient_shards={find_shard_count(counts, DEFAULT_SHARDS)}"]
    if algo in (None, "ppo"):
        fixed += LARGE_UPDATES
    case, runtime = workloads.make_env_case(
        env, algorithm=algo, preset=preset, iterations=iterations + 1, sets=[*fixed, *(sets or ())]
    )
    run.run_learners(case, runtime, counts, repeat, parse_folder(out), as_json=as_json, debug=debug)
