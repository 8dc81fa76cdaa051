"""From the flags of a command to a config. Must not know: how a config is run or shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflame.config import module_trust, nested, toml_io, torchrun
from rlflame.config import resolve as config_resolve
from rlflame.config.recipe import DEFAULT_SHARDS, LearningSettings, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.config.user_env_file import load_env_file
from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.rollout.blas import limit_threads as limit_threads
from rlflame.storage.sweep_dir import RESTORE_HINT, SWEEP_FILE, is_sweep, list_seed_runs
from rlflame.training.critic_helper import conditions


def collect_runtime_flags(
    *,
    workers: int | None,
    learners: int | None = None,
    fleet: str | None,
    local: bool,
    debug: bool,
    env_file: Path | None = None,
    allow_modules: Sequence[str] | None = None,
    out: Path | None = None,
    video_every: int | None = None,
    json_lines: bool = False,
    quiet: bool = False,
    plain: bool = False,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """What the flags say of the runtime; what they do not say is absent."""
    display_flags = [
        name for name, on in (("json", json_lines), ("quiet", quiet), ("plain", plain)) if on
    ]
    if len(display_flags) > 1:
        flags = " and ".join(f"--{name}" for name in display_flags)
        raise ConfigError(f"{flags} exclude each other.", "leave out one")
    if local and fleet not in (None, "local"):
        raise ConfigError(f"--local and --fleet {fleet} exclude each other.", "leave out one")
    if out is not None:
        if out.resolve() == Path.cwd():
            raise ConfigError(
                f"--out {str(out)!r} is the current folder.", "name a new one: --out runs/mine"
            )
        try:
            str(out).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--out {str(out)!r} is not UTF-8.", "another name") from error
    if env_file is not None:
        load_env_file(str(env_file.resolve()))
    module_trust.allow_modules(allow_modules or ())
    rank = torchrun.read_rank()
    settings: dict[str, Any] = {
        "workers": workers,
        "learners": learners or (rank.size if rank else None),
        "fleet": fleet or ("local" if local else None),
        "env_file": str(env_file.resolve()) if env_file else None,
        "out": str(out) if out else None,
        "video_every_steps": video_every,
        "debug": debug or None,
        "tensorboard": tensorboard or None,
        "progress": display_flags[0] if display_flags else None,
    }
    return {f"runtime.{name}": value for name, value in settings.items() if value is not None}


def resolve(
    *,
    environment: str | None,
    algorithm: str | None,
    preset: str | None,
    config_file: Path | None,
    sets: Sequence[str],
    env_kwargs: Sequence[str],
    steps: int | None,
    iterations: int | None,
    episodes_per_iter: int | None,
    seed: int | None,
    until_return: float | None,
    runtime: Mapping[str, Any],
    scale_batch: bool = False,
    scale_lr: bool = False,
    device: str | None = None,
) -> tuple[RunConfig, str]:
    """The config of `rlflame train` and the name of the preset under it."""
    flags: dict[str, Any] = dict(runtime)
    if environment == "":
        raise ConfigError("--env is empty.", "rlflame envs lists them")
    if steps is not None or iterations is not None:
        flags |= {"stop_at_steps": steps, "stop_at_iterations": iterations}
    if seed is not None:
        flags["learning.seed"] = seed
    if device is not None:
        flags |= _make_device_flags(device)
    if until_return is not None:
        flags["evaluation.until_return"] = until_return
    for text in env_kwargs:
        key, equals, value_text = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(f"--env-kwargs {text!r} is not KEY=VALUE.", "--env-kwargs gravity=5")
        flags[f"learning.environment.kwargs.{key.strip()}"] = toml_io.parse_value(
            value_text.strip()
        )
    config, name = config_resolve.resolve(
        environment=environment,
        algorithm=algorithm,
        preset=preset,
        config_file=config_file,
        sets=sets,
        flags=flags,
        continuous=_has_continuous_actions,
    )
    check_learners(config.learning, config.runtime.learners)
    conditions.check_critic_helper(config.learning, config.runtime)
    only_reinforce = {"--iterations": iterations, "--episodes-per-iter": episodes_per_iter}
    used_flags = [flag for flag, value in only_reinforce.items() if value is not None]
    algorithm_name = config.learning.algorithm
    if algorithm_name != "reinforce" and used_flags:
        raise ConfigError(
            f"{used_flags[0]} is for REINFORCE; {algorithm_name.upper()} counts steps.",
            "--steps 100000, or --algo reinforce",
        )
    if episodes_per_iter is not None:
        config = copy_with_episodes(config, episodes_per_iter)
    if scale_batch:
        check_scale(config)
    return scale_config(config, batch=scale_batch, learning_rate=scale_lr), name


def _make_device_flags(device: str) -> dict[str, str]:
    """What `--device` says; auto is CUDA where torch finds it."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"There is no device {device!r}.", "--device cpu, cuda or auto")
    if device == "cpu":
        return {"learning.device": "cpu"}
    limit_threads(1)
    from rlflame.learning.networks import torch_networks

    if torch_networks.is_cuda_available():
        return {"learning.device": "cuda", "learning.provider": "torch"}
    if device == "cuda":
        raise ConfigError(
            "torch finds no CUDA device here.", "--device cpu, or auto to take what there is"
        )
    return {"learning.device": "cpu"}


def scale_config(config: RunConfig, *, batch: bool, learning_rate: bool) -> RunConfig:
    """The recipe of learners that each keep a batch of their own: N times the samples of an update,
    as many updates from each learner's own steps, and N times the learning rate."""
    learners = config.runtime.learners
    if learners == 1 or not (batch or learning_rate):
        return config
    data = config.model_dump()
    learning = data["learning"]
    settings = learning[config.learning.algorithm]
    if batch and config.learning.ppo is not None:
        settings["minibatch_size"] *= learners
    elif batch and config.learning.sac is not None:
        settings["batch_size"] *= learners
        settings["updates_per_step"] /= learners
    elif batch:
        learning["rollout"]["num_slots"] *= learners
    if learning_rate:
        for name in ("learning_rate", "critic_learning_rate", "entropy_learning_rate"):
            if settings.get(name) is not None:
                settings[name] *= learners
    return config_resolve.validate_config(data)


def check_scale(config: RunConfig) -> None:
    """A minibatch has no more samples than an iteration collects: what is asked for would not be
    what is learned from, under a learning rate that is made for it."""
    ppo, rollout, learners = config.learning.ppo, config.learning.rollout, config.runtime.learners
    collected = rollout.columns * rollout.steps
    if ppo is None or rollout.unit != "steps" or ppo.minibatch_size * learners <= collected:
        return
    enough = -(-ppo.minibatch_size * learners // rollout.columns)
    raise ConfigError(
        f"--scale-batch makes minibatches of {ppo.minibatch_size * learners:,} samples, and an "
        f"iteration collects {collected:,}.",
        f"--set rollout.steps={enough}, or --learners {max(1, collected // ppo.minibatch_size)}",
    )


def check_learners(learning: LearningSettings, learners: int) -> None:
    """Every learner has as many of the recipe's shards as every other."""
    shards = learning.gradient_shards
    if shards % learners == 0:
        return
    fitting = learners * -(-DEFAULT_SHARDS // learners)
    shards_hint = f"; or, in a new run, --set learning.gradient_shards={fitting}"
    possible = [str(n) for n in range(1, shards + 1) if shards % n == 0]
    counts = " or ".join(filter(None, [", ".join(possible[:-1]), possible[-1]]))
    raise ConfigError(
        f"{learners} learners cannot share {shards} {'shard' if shards == 1 else 'shards'} evenly.",
        f"--learners {counts}{'' if learning.whole_batches else shards_hint}",
    )


def copy_with_episodes(config: RunConfig, episodes: int) -> RunConfig:
    """The same config with this many episodes an iteration, in slots as wide as before or less."""
    if episodes < 1:
        raise ConfigError(f"--episodes-per-iter is {episodes}.", "--episodes-per-iter 100")
    widest = min(config.learning.rollout.envs_per_slot, episodes)
    width = next(n for n in range(widest, 0, -1) if episodes % n == 0)
    data = config.model_dump()
    nested.set_nested(data, "learning.rollout.envs_per_slot", width)
    nested.set_nested(data, "learning.rollout.num_slots", episodes // width)
    return config_resolve.validate_config(data)


def read_recorded_config(target: Path) -> dict[str, Any]:
    """What the config.toml of a run says, for a run folder or a checkpoint in one."""
    folder = _find_run_folder(target)
    file = folder / (SWEEP_FILE if is_sweep(folder) else "config.toml")
    if not file.is_file() and list_seed_runs(folder):
        raise ConfigError(
            f"{folder} holds seeds, and no {SWEEP_FILE} that says what runs them.", RESTORE_HINT
        )
    # A run goes on without its config, which its checkpoints hold; a job is what its file says.
    hint = RESTORE_HINT if is_sweep(folder) else f"mend it or remove it: {format_shell('rm', file)}"
    try:
        return toml_io.read_file(file) if file.is_file() else {}
    except ConfigError as error:
        raise ConfigError(error.message, hint) from error


def read_recorded_env_file(target: Path) -> str | None:
    """The environment file that a run's config.toml names, which is shown and never loaded."""
    try:
        path = nested.get_nested(read_recorded_config(target), "runtime.env_file")
    except ConfigError:
        return None
    return path if isinstance(path, str) else None


def _find_run_folder(target: Path) -> Path:
    """The folder of a run, or of the one that a checkpoint lies in."""
    folder = target if target.is_dir() else target.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def make_resumed_runtime(
    target: Path, saved_config: Mapping[str, Any], flags: Mapping[str, Any], sets: Sequence[str]
) -> RuntimeSettings:
    """The runtime to resume with: flags and --set over what the run was begun with."""
    for text in sets:
        key, value = config_resolve.parse_set(text)
        if key in ("stop_at_steps", "stop_at_iterations"):
            steps = value if key == "stop_at_steps" else "N"
            raise ConfigError(
                f"{key} is not set on resume, which has an option for the end.",
                format_command("resume", target, "--steps", steps),
            )
    named = dict(map(config_resolve.parse_set, sets))
    config_resolve.check_packages(
        saved_config,
        {"runtime": {"flame": {"extra_dependencies": named.get(config_resolve.PACKAGES)}}},
        str(
            _find_run_folder(target)
            / (SWEEP_FILE if is_sweep(_find_run_folder(target)) else "config.toml")
        ),
    )
    saved_runtime = saved_config.get("runtime")
    saved_settings = saved_runtime if isinstance(saved_runtime, dict) else {}
    # How a run is shown, and whose code runs, is this command's choice and not the file's.
    inherited = {
        key: value
        for key, value in saved_settings.items()
        if key not in ("progress", "debug", "env_file")
    }
    return _apply_flags(
        {"runtime": inherited},
        flags,
        sets,
        "which resume does not change.",
        f"start a new run from this policy: {_format_train_command(target, saved_config, sets)}",
    )


def _format_train_command(
    target: Path, saved_config: Mapping[str, Any], sets: Sequence[str]
) -> str:
    """The command that trains on from a run's policy with a recipe like its own but for `sets`."""
    run = _find_run_folder(target)
    policy = run / "latest.safetensors" if target.is_dir() else target
    has_init_policy = nested.get_nested(saved_config, "learning.init_policy") is not None
    changes = [*sets, *(["learning.init_policy=none"] if has_init_policy else [])]
    options = [word for text in changes for word in ("--set", text)]
    return format_command("train", "--config", run / "config.toml", "--init-from", policy, *options)


def read_recorded_threads(saved_config: Mapping[str, Any]) -> int:
    """The recipe's threads, which count before numpy is there to read the recipe itself."""
    threads = nested.get_nested(saved_config, "learning.threads")
    return threads if isinstance(threads, int) and threads > 0 else 1


def make_runtime(flags: Mapping[str, Any], sets: Sequence[str]) -> RuntimeSettings:
    """A runtime of flags and --set alone."""
    runtime = _apply_flags(
        {}, flags, sets, "and a policy is scored by its own.", "name settings that begin: runtime."
    )
    if runtime.env_file is not None:
        load_env_file(runtime.env_file)
    return runtime


def _apply_flags(
    data: dict[str, Any], flags: Mapping[str, Any], sets: Sequence[str], reason: str, hint: str
) -> RuntimeSettings:
    """Flags over --set over what is in `data`; `reason` no setting of a recipe may be there."""
    for text in sets:
        key, value = config_resolve.parse_set(text)
        if not key.startswith("runtime."):
            raise ConfigError(f"{key} belongs to the recipe, {reason}", hint)
        nested.set_nested(data, key, value)
    config_resolve.resolve_paths(data, Path.cwd())
    for key, value in flags.items():
        nested.set_nested(data, key, value)
    return config_resolve.validate_config({"stop_at_steps": 1, **data}).runtime


def _has_continuous_actions(config: RunConfig) -> bool:
    limit_threads(config.learning.threads)
    from rlflame.experiment import components
    from rlflame.training.stop_signal import SignalStop, abort_on_stop

    with SignalStop() as stop, abort_on_stop(stop):
        return components.has_continuous_actions(config)
