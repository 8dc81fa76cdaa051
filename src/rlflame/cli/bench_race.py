"""`rlflame bench --recipe dppo` and `dsac`. Must not know: how anything is timed or worded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def race(
    name: str,
    learners: Sequence[int],
    kinds: Sequence[str],
    steps: int | None,
    repeat: int,
    sets: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
    debug: bool,
) -> None:
    from rlflame.bench import published_dppo, race_runs
    from rlflame.errors import ConfigError

    if len(kinds) > 1:
        raise ConfigError(f"--recipe {name} collects in one place.", f"--compare {kinds[0]}")
    variants = published_dppo.make_variants(
        published_dppo.find_setup(name), learners, steps=steps, sets=sets
    )
    race_runs.run_race(name, variants, kinds[0], repeat, out, as_json=as_json, debug=debug)
