"""Many seeds of one recipe, from a config or a folder of them to what they say together.

Must not know: the command line, terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend
from rlflame.config import env_file
from rlflame.config.module_trust import allowed_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.output import as_json_text
from rlflame.console.recipe_summary import Facts
from rlflame.console.sweep_base import JobResult, JobStart, SeedsShow, Shares, SilentSeeds
from rlflame.console.sweep_progress import SeedsBoard
from rlflame.errors import RlflameError, typed
from rlflame.experiment import components, run
from rlflame.experiment.sweep import job as jobs
from rlflame.experiment.sweep.job import Job, Standing
from rlflame.experiment.sweep.resources import shares
from rlflame.experiment.sweep.seed_processes import Crew
from rlflame.experiment.sweep.summary import summary
from rlflame.fleet import factory
from rlflame.fleet.base import Fleet, FleetEvent
from rlflame.learning.factory import blas_threads
from rlflame.rollout import blas
from rlflame.rollout.process.parent_channel import Message
from rlflame.storage import run_reader, safetensors_file
from rlflame.storage.machine_memory import PROCESS_BYTES, available_bytes
from rlflame.storage.run_dir import RunFolder, is_locked, writing
from rlflame.storage.sweep_dir import seed_folder
from rlflame.storage.sweep_result import Outcome
from rlflame.training.stop_signal import NeverStop
from rlflame.training.trainer import Stop

_PATIENCE_S = 20.0


def train(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    preset: str = "",
    init_from: Path | None = None,
    show: SeedsShow | None = None,
    stop: Stop | None = None,
) -> JobResult:
    """Train a config with each of the seeds, in a new folder of run folders."""
    stop, show = stop or NeverStop(), show or SilentSeeds()
    runtime = config.runtime
    recipe = env_file.with_env_file(config.recipe.with_horizon(), runtime.env_file)
    # All that can be refused is refused once, before there is a folder.
    run.check_start(recipe.learning, init_from)
    env = run.environment(recipe, stop)
    components.check_memory(recipe, env, begun=False)
    if init_from is not None:
        learning, _ = run.started_from(recipe.learning, env, init_from)
        recipe = recipe.model_copy(update={"learning": learning})
    components.policy_spec(recipe.learning, env)
    learning = recipe.learning.model_copy(update={"seed": seeds[0]})
    whole = RunConfig(
        **{name: getattr(recipe, name) for name in type(recipe).model_fields}, runtime=runtime
    ).model_copy(update={"learning": learning})
    started = str(init_from.resolve()) if init_from is not None else None
    job = Job(whole, tuple(seeds), preset, started)
    with _Conductor(job, show, stop) as conductor:
        folder = RunFolder.create(jobs.default_path(config, job.seeds))
        if moved := folder.instead_of(config.runtime.out):
            show.note(moved)
        try:
            jobs.write(folder.path, job)
            return conductor.conduct(folder, Facts(recipe, env, preset), resumed=False)
        finally:
            folder.release()


def resume(
    folder: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    show: SeedsShow | None = None,
    stop: Stop | None = None,
) -> JobResult:
    """Finish what of a job is unfinished, or take all seeds to so many steps."""
    stop, show = stop or NeverStop(), show or SilentSeeds()
    lock = jobs.opened(folder)
    try:
        job = jobs.read(folder)
        recorded_env_file = job.config.runtime.env_file
        job = job.with_runtime(runtime)
        _await_processes(folder, job, show)
        jobs.check_recipe(folder, job)
        if steps is not None:
            jobs.check_goal(folder, job, steps)
            job = job.with_steps(steps)
        if all(jobs.standing(folder, job, seed).over for seed in job.seeds):
            return _result(folder, job, {}, began=False)
        env_file.with_env_file(job.config.recipe, runtime.env_file, lambda: recorded_env_file)
        env = run.environment(job.config.recipe, stop)
        jobs.write(folder, job)
        with _Conductor(job, show, stop) as conductor:
            facts = Facts(job.config.recipe, env, job.preset)
            return conductor.conduct(lock, facts, resumed=True)
    finally:
        lock.release()


def _await_processes(folder: Path, job: Job, show: SeedsShow) -> None:
    """A job that was killed has seeds that notice it a moment later."""
    end = time.monotonic() + _PATIENCE_S
    for seed in job.seeds:
        path = seed_folder(folder, seed)
        if path.exists() and is_locked(path) and time.monotonic() < end:
            show.note(
                f"Another process is still training in {path}: waiting up to {_PATIENCE_S:g} s "
                "for its end."
            )
        while path.exists() and is_locked(path) and time.monotonic() < end:
            time.sleep(0.1)


class _Conductor:
    """A fleet for all seeds, where one is shared, and the crew that uses it."""

    def __init__(self, job: Job, show: SeedsShow, stop: Stop) -> None:
        self._job = job
        self._show = show
        self._stop = stop
        self._board = SeedsBoard(
            job.seeds,
            stop_at_steps=job.config.stop_at_steps,
            stop_at_iterations=job.config.stop_at_iterations,
        )
        self._fleet: Fleet | None = None
        self._check: Callable[[], None] = lambda: None

    def __enter__(self) -> _Conductor:
        runtime = self._job.config.runtime
        if factory.choice(runtime) == "flame":
            slots = self._job.config.learning.rollout.num_slots * len(self._job.seeds)
            self._fleet = factory.fleet(runtime, slots, self._fleet_event)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def conduct(self, whole: RunFolder, facts: Facts, *, resumed: bool) -> JobResult:
        job, board, folder = self._job, self._board, whole.path
        self._check = whole.check_held
        found = [jobs.standing(folder, job, seed) for seed in job.seeds]
        for one in found:
            progress = one.found.progress if one.found is not None else None
            held = one.found.evaluation or one.found.best if one.found is not None else None
            board.stands(
                one.seed, progress.steps if progress else 0,
                "finished" if one.over else "waiting", held.mean if held else None,
            )  # fmt: skip
        left = [one for one in found if not one.over]
        share = self._shares(len(left), facts)
        name = "here" if self._fleet is None else self._fleet.name
        capacity = share.at_once if self._fleet is None else self._fleet.capacity
        start = JobStart(folder, facts, job.seeds, name, capacity, share, resumed)
        if share.memory_bound:
            self._show.note(
                f"{share.at_once} side by side, for memory's sake; the others wait for them."
            )
        with self._show.begin(start, board):
            outcomes = Crew(
                {one.seed: self._order(one, folder, share) for one in left},
                self, self._stop, at_once=share.at_once,
                threads=blas_threads(job.config.learning),
                lend=self._fleet, show_output=job.config.runtime.debug,
            ).run()  # fmt: skip
        whole.check_held()
        return _result(folder, job, outcomes, began=True, seconds=board.elapsed_s)

    def _shares(self, seeds: int, facts: Facts) -> Shares:
        runtime, learning = self._job.config.runtime, self._job.config.learning
        replay = facts.replay.nbytes if facts.replay is not None else 0
        memory = available_bytes()
        if self._fleet is not None:
            # They mostly wait for executors, so there may be more of them than cores.
            fitting = int(memory / (replay + PROCESS_BYTES))
            return Shares(max(1, min(seeds, fitting)), 0, memory_bound=fitting < seeds)
        return shares(
            seeds,
            cores=runtime.workers or blas.usable_cores(),
            # Lanes change no bit and wait for each other without spinning: one core will do.
            threads=blas_threads(learning) if learning.provider == "numpy" else learning.threads,
            replay_bytes=replay,
            available_bytes=memory,
            split=runtime.fleet != "inline",
        )

    def _order(self, one: Standing, folder: Path, share: Shares) -> Message:
        """What the process of a seed is told."""
        fleet: Message = {"kind": "local" if share.workers else "inline", "workers": share.workers}
        if self._fleet is not None:
            fleet = {
                "kind": "lent", "name": self._fleet.name, "capacity": self._fleet.capacity
            }  # fmt: skip
        recipe = one.found.recipe if one.found is not None else self._job.config
        return {
            "what": "order",
            "config": self._job.config_of(one.seed, folder).model_dump(mode="json"),
            "preset": self._job.preset,
            "init_from": self._job.init_from,
            "modules": allowed_modules(),
            "folder": str(one.folder),
            "resume": one.begun,
            "steps": recipe.stop_at_steps if recipe.stop_at_iterations is None else None,
            "fleet": fleet,
        }

    # What the crew tells, and the fleet.

    def begun(self, seed: int) -> None:
        self._check()
        self._board.begun(seed)

    def event(self, seed: int, event: Mapping[str, Any]) -> None:
        self._board.event(seed, event)
        if event.get("event") == "note":
            self._show.note(f"seed {seed}: {event['text']}")
        elif event.get("event") == "retried" and event.get("reason"):
            self._show.note(f"seed {seed}: slot {event['slot']} again; {event['reason']}.")
        self._show.event(seed, event)

    def ended(self, seed: int, outcome: Outcome) -> None:
        self._board.ended(seed, outcome)
        self._show.ended(seed, outcome)

    def _fleet_event(self, event: FleetEvent) -> None:
        if event.kind == "phase":
            self._board.phase = event.text
        elif event.kind == "workers":
            self._board.workers = int(event.text)
        elif event.kind in ("note", "retried") and event.text:
            self._show.note(event.text)


def _result(
    folder: Path, job: Job, outcomes: Mapping[int, Outcome], *, began: bool, seconds: float = 0.0
) -> JobResult:
    """What the seeds come to, written down beside them."""
    found = summary(folder, job, outcomes)
    with writing(folder, typed("resume", folder)):
        safetensors_file.write_atomically(folder / "seeds.csv", found.as_csv().encode())
        text = as_json_text({"folder": str(folder), **found.as_dict()}, indent=2) + "\n"
        safetensors_file.write_atomically(folder / "summary.json", text.encode())
    return JobResult(folder, found, outcomes, began, _drawn(folder), seconds)


def _drawn(folder: Path) -> Path | None:
    """The picture of all seeds, where matplotlib is there to draw it and there are curves."""
    out = folder / "plot.png"
    try:
        matplotlib_backend.check_available()
        runs, _ = run_reader.read_all([folder])
        safetensors_file.write_atomically(out, matplotlib_backend.image(curves.picture(runs), out))
    except RlflameError:
        return None
    return out
