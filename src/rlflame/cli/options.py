"""Shared options, the options of `train` and `resume`, and the layout of help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand

from rlflame.config.flags import (
    ALGORITHM_NAMES,
    DEFAULT_ALGORITHM,
    PRESET_FOLDER,
    RuntimeFlags,
)
from rlflame.console.output import format_pairs, print_note, print_result
from rlflame.rollout.blas import limit_threads

if TYPE_CHECKING:
    from rlflame.config.runtime import RuntimeSettings
    from rlflame.storage.checkpoint import Checkpoint

_names, _last = ", ".join(ALGORITHM_NAMES[:-1]), ALGORITHM_NAMES[-1]
ALGO_HELP = f"Algorithm: {_names} or {_last}. [default: {DEFAULT_ALGORITHM}]"

#: Commas separate groups of three digits; a decimal comma is refused.
_COUNT = re.compile(
    r"(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:[eE][+]?[0-9]{1,2})?)([kKmM]?)"
)

CheckpointFile = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Checkpoint, policy file or run folder.")
]
ExistingRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, checkpoint or sweep folder.")
]


def parse_count(text: str | int) -> int:
    """Parse a number of steps such as 100000, 1e5, 100k or 1M."""
    match = _COUNT.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number, such as 100000, 1e5, 100k or 1M.")
    digits, unit = match.groups()
    count = Decimal(re.sub("[_,]", "", digits)) * {"": 1, "k": 1000, "m": 1_000_000}[unit.lower()]
    if count != int(count):
        raise typer.BadParameter(f"{text!r} is not a whole number.")
    return int(count)


TotalSteps = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=parse_count, help="Stop at step N, counted from the start of the run."
    ),
]
TotalIterations = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=parse_count,
        help="Stop at iteration N, counted from the start of the run.",
    ),
]
FreshReplay = Annotated[
    bool,
    typer.Option(
        "--fresh-replay",
        help="Empty the replay buffer and keep the weights. Use this if replay files are lost.",
    ),
]
NewSchedule = Annotated[
    bool,
    typer.Option(
        "--new-schedule",
        help="Start a new run from the best policy of RUN, with new schedules of its settings, "
        "such as the learning rate. It takes the steps or iterations that are missing until N.",
    ),
]
Seeds = Annotated[
    str | None, typer.Option(metavar="LIST", help="Train with several seeds, like 0-9 or 0,3,7.")
]
InitFrom = Annotated[
    Path | None, typer.Option(help="Start training from the policy in this file.", metavar="CKPT")
]
PlotReturns = Annotated[
    bool,
    typer.Option(
        "--plot", help="Save a plot of the training returns, and open it if there is a display."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the complete configuration as TOML and exit.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Maximum number of workers or Flame executors. [default: as many as fit]"
    ),
]
Fleet = Annotated[
    str | None,
    typer.Option(
        help="Where rollouts run: local (worker processes), flame (Flame cluster), inline (this "
        "process) or auto, which chooses between local and flame. [default: auto]",
        metavar="NAME",
    ),
]
Local = Annotated[
    bool,
    typer.Option(
        "--local",
        help="Run on this machine even if a Flame cluster is configured. Same as --fleet local.",
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.py", help="Python file that defines your environment. Sent to all workers."
    ),
]
AllowModules = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-module",
        metavar="MODULE",
        help="Allow rlflame to import this Python module. Importing a module runs its code. "
        "Repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and the output of environments.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting, such as network.activation=relu. See `rlflame config`. Repeatable.",
        metavar="NAME=VALUE",
    ),
]
RuntimeSets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a runtime setting, such as runtime.max_retries=5. See `rlflame config`. "
        "Repeatable.",
        metavar="NAME=VALUE",
    ),
]


def _list_presets() -> list[str]:
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.toml"))


def _list_aliases() -> list[str]:
    from rlflame.config.preset_catalog import ALIASES

    return sorted(ALIASES)


#: The options of `train` and `resume` by panel and parameter name, in the order of the help.
#: An option without a type has the type of its field in the flags.
_PANELS: dict[str, dict[str, Any]] = {
    "Environment": {
        "env": typer.Option(
            metavar="ENV",
            help="Alias from `rlflame envs`, Gymnasium id, module:Id, or module:function. "
            "[default: cartpole]",
            autocompletion=_list_aliases,
        ),
        "env_kwargs": Annotated[
            list[str] | None,
            typer.Option(help="Environment constructor argument. Repeatable.", metavar="KEY=VALUE"),
        ],
        "wrap": Annotated[
            list[str] | None,
            typer.Option(
                help="Wrapper of the environment and its arguments. Repeatable; the last one is "
                "the outermost.",
                metavar="MODULE:CLASS,KEY=VALUE,...",
            ),
        ],
        "env_file": EnvFile,
        "allow_modules": AllowModules,
    },
    "Algorithm": {
        "algo": typer.Option(
            metavar="ALGO", help=ALGO_HELP, autocompletion=lambda: ALGORITHM_NAMES
        ),
        "preset": typer.Option(
            metavar="NAME",
            help="Preset from `rlflame envs`. [default: depends on ENV and ALGO]",
            autocompletion=_list_presets,
        ),
        "config": typer.Option(metavar="FILE", help="TOML file with settings."),
        "sets": Sets,
        "seed": typer.Option(metavar="N", help="Seed for all random numbers. [default: 0]"),
        "seeds": Seeds,
        "init_from": InitFrom,
        "scale_batch": typer.Option(
            "--scale-batch", help="Multiply the batch size by the number of learners."
        ),
        "scale_lr": typer.Option(
            "--scale-lr", help="Multiply the learning rate by the number of learners."
        ),
        "fresh_replay": FreshReplay,
        "new_schedule": NewSchedule,
    },
    "Duration": {
        "steps": typer.Option(
            metavar="N",
            parser=parse_count,
            help="Stop after N environment steps, such as 100000, 1e5 or 1M. [default: from the "
            "preset]",
        ),
        "iterations": typer.Option(
            metavar="N",
            parser=parse_count,
            help="Stop after N iterations (REINFORCE). [default: from the preset, such as 100]",
        ),
        "episodes_per_iter": typer.Option(metavar="N", help="Episodes per iteration (REINFORCE)."),
        "horizon": typer.Option(
            metavar="N",
            parser=parse_count,
            help="Step (or iteration, with --iterations) at which schedules such as the learning "
            "rate end. [default: the end of the run]",
        ),
        "until_return": typer.Option(
            metavar="X", help="Stop when an evaluation's 95% confidence interval is above X."
        ),
    },
    "Execution": {
        "workers": Workers,
        "learners": typer.Option(
            metavar="N", help="Number of processes that compute gradients, or auto. [default: auto]"
        ),
        "device": typer.Option(
            metavar="NAME", help="Device for computing gradients: cpu, cuda or auto. [default: cpu]"
        ),
        "fleet": Fleet,
        "local": Local,
    },
    "Output": {
        "out": typer.Option(
            "--out", "-o", metavar="DIR", help="Run folder. [default: runs/ENV-ALGO-SEED]"
        ),
        "plot": PlotReturns,
        "video_every": typer.Option(
            "--video-every", metavar="N", help="Record a short video every N steps.", min=1
        ),
        "tensorboard": typer.Option(
            "--tensorboard", help="Write TensorBoard logs to the run folder."
        ),
        "dry_run": DryRun,
        "json_lines": typer.Option("--json", help="Print progress as JSON, one object per line."),
        "quiet": typer.Option("--quiet", "-q", help="Print only the run folder, at the end."),
        "plain": typer.Option("--plain", help="Print progress as plain lines, even on a terminal."),
        "debug": Debug,
    },
}
_OPTIONS = {name: option for options in _PANELS.values() for name, option in options.items()}
_PANEL_NAMES = {name: panel for panel, options in _PANELS.items() for name in options}


class HelpCommand(TyperCommand):
    """A command whose help shows arguments without the note `[required]`."""

    panels: Mapping[str, str] = {}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [item for item in self.get_params(ctx) if isinstance(item, TyperArgument)]
        names = (item.metavar if item.required else f"[{item.metavar}]" for item in arguments)
        return ["[OPTIONS]", *map(str, names)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for item in self.get_params(ctx):
            title, record = self.panels.get(str(item.name), "Options"), item.get_help_record(ctx)
            if isinstance(item, TyperArgument) and record is not None:
                title, record = "Arguments", (str(item.metavar), record[1].split("  [required")[0])
            if record is not None:
                sections.setdefault(title, []).append(record)
        width = min(28, max(len(name) for rows in sections.values() for name, _ in rows))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


class PanelCommand(HelpCommand):
    """A command whose help groups the options by panel."""

    panels = _PANEL_NAMES


def add_flag_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each named field (by default, each field) of `flags`.

    The command receives the options as one object, its `flags` parameter.
    """

    def add_options(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        flag_type = parameters.pop("flags").annotation
        types = get_type_hints(flag_type)
        fields = [item for item in dataclasses.fields(flag_type) if item.name in names or not names]

        @functools.wraps(command)
        def run(**options: Any) -> None:
            flags = flag_type(**{item.name: options.pop(item.name) for item in fields})
            command(**options, flags=flags)

        kind = inspect.Parameter.KEYWORD_ONLY
        for name, default in ((item.name, item.default) for item in fields):
            option = RuntimeSets if name == "sets" and flag_type is RuntimeFlags else _OPTIONS[name]
            hint = option if get_origin(option) is Annotated else Annotated[types[name], option]
            parameters[name] = inspect.Parameter(name, kind, default=default, annotation=hint)
        order = [name for name in parameters if name not in _OPTIONS] + [*_OPTIONS]
        items = [
            parameters[name].replace(kind=kind) for name in sorted(parameters, key=order.index)
        ]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in items}
        run.__signature__ = inspect.Signature(items)  # type: ignore[attr-defined]
        return run

    return add_options


class PolicySource(NamedTuple):
    """A policy, its file and the runtime settings of the command."""

    file: Path
    checkpoint: Checkpoint
    runtime: RuntimeSettings


def load_source(path: Path, flags: RuntimeFlags) -> PolicySource:
    """Load a policy from a file or a run folder, and resolve the runtime settings."""
    from rlflame.config.resolve import resolve_runtime

    runtime = resolve_runtime(flags)
    limit_threads(1)  # before numpy is imported
    file, checkpoint = load_named_policy(path)
    return PolicySource(file, checkpoint, runtime)


def load_named_policy(path: Path) -> tuple[Path, Checkpoint]:
    """Load a policy; if the path is a run folder, print which of its policies is used."""
    from rlflame.storage import checkpoint
    from rlflame.storage.run_folder import find_policy_file

    file = find_policy_file(path)
    policy = checkpoint.load(file)
    if file != path:
        kind = "best" if file.name == "best.safetensors" else "latest"
        steps = f"step {policy.progress.steps:,}"
        print_note(f"{path} is a run folder; its {kind} policy is used: {file} ({steps}).")
    return file, policy


def print_machine_note(source: Checkpoint, seed: int, returns: Mapping[int, float]) -> None:
    """Print how this machine differs from that of the file, if returns differ as well."""
    from rlflame.experiment import comparison, resume

    differences = resume.find_machine_differences(source)
    if differences and comparison.has_other_returns(source.evaluation, seed, returns):
        print_note(
            "The returns differ from the recorded ones, probably because this machine differs "
            f"from the one that wrote the file ({'; '.join(differences)})."
        )


def print_pairs(lines: Iterable[tuple[str, str]]) -> None:
    for line in format_pairs([*lines]):
        print_result(line)
