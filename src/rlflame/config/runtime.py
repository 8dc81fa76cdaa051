"""The runtime, which decides the speed: where a run executes, how it is shown, what it keeps.

No setting here may change a bit of the weights.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]


class SettingsModel(BaseModel):
    """Base class for every section of a config: frozen, and unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans for numbers, and integers that a checkpoint's 64 bits cannot hold."""
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, int) and abs(part) >= 2**63:
                raise ValueError(f"a number of {part.bit_length()} bits is too large (maximum 63)")
            annotation = cls.model_fields[str(info.field_name)].annotation
            if isinstance(part, bool) and bool not in (annotation, *get_args(annotation)):
                raise ValueError("true and false are not allowed")
        return value


class FlameSettings(SettingsModel):
    """How a run uses a Flame cluster."""

    cpu: int | None = Field(
        None, ge=0, le=1024, description="CPUs per executor; by default the cluster's setting."
    )
    memory: str | None = Field(
        None,
        pattern=r"^[0-9]+[kmgtKMGT]?$",
        description="Memory per executor, such as 2g; by default the cluster's setting.",
    )
    min_executors: int = Field(0, ge=0, le=4096, description="Minimum number of executors.")
    python_version: str | None = Field(
        None,
        pattern=r"^3\.[0-9]+$",
        description="The executors' Python, such as 3.12. The default is this machine's version "
        "if packages are installed, and the executors' own version otherwise.",
    )
    dependencies: Literal["auto", "prepared", "install"] = Field(
        "auto",
        description="Whether executors have numpy and Gymnasium (prepared) or install them for "
        "each run (install). auto asks the executors.",
    )
    extra_dependencies: tuple[str, ...] = Field(
        (), description="Additional packages to install for your environment."
    )
    template: str | None = Field(None, description="Application template; by default flmrun.")
    start_deadline_s: float = Field(300.0, gt=0.0, description="Longest wait for an executor.")
    task_deadline_s: float = Field(
        600.0, gt=0.0, description="Retry a slower fragment elsewhere, up to max_retries times."
    )
    reconnect_s: float = Field(
        120.0, ge=0.0, description="Longest outage of the session manager or cache during a run."
    )
    delay_release_s: int = Field(120, ge=1, le=86_400, description="Time idle executors are kept.")


class RuntimeSettings(SettingsModel):
    """The settings that decide the speed and change no bit of the weights."""

    fleet: Literal["auto", "local", "flame", "inline"] = Field(
        "auto",
        description="Where rollouts run: worker processes (local), a Flame cluster (flame) or this "
        "process (inline). auto is local. If a cluster is configured, auto times both in the first "
        "iterations and continues with the faster.",
    )
    workers: Positive | None = Field(
        None,
        le=4096,
        description="Worker processes; by default one per usable core. On Flame, the maximum "
        "number of executors; by default all that fit.",
    )
    learners: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="Processes that share the gradient computation. auto times one and several "
        "learners at the start and continues with the faster.",
    )
    learner_deadline_s: float = Field(
        60.0, gt=0.0, description="A learner that takes longer counts as hung."
    )
    compare_learners_every: Positive | None = Field(
        None, description="Updates between comparisons of the learners' states; absent: none."
    )
    env_file: str | None = Field(
        None,
        description="A Python file with your environment, sent to every worker. In a config file, "
        "a path relative to that file.",
    )
    out: str | None = Field(
        None,
        description="The run folder; by default runs/ENVIRONMENT-ALGORITHM-SEED, with a number "
        "added if that folder exists.",
    )
    checkpoint_every_steps: Positive = Field(
        100_000, description="Steps between checkpoints; one is always written at the end."
    )
    keep_checkpoints: Positive = Field(3, description="Number of newest checkpoints to keep.")
    video_every_steps: Positive | None = Field(
        None, description="Steps between short videos of the policy, in videos/; absent: none."
    )
    step_deadline_s: float = Field(
        60.0, gt=0.0, description="An environment that takes longer for one step counts as hung."
    )
    max_retries: int = Field(3, ge=0, le=1000, description="Retries of a lost worker's fragment.")
    progress: Literal["auto", "live", "plain", "json", "quiet"] = Field(
        "auto", description="How progress is shown; auto is live on a terminal, plain otherwise."
    )
    tensorboard: bool = Field(False, description="Write curves for TensorBoard to the run folder.")
    debug: bool = Field(False, description="Show tracebacks and the output of environments.")
    flame: FlameSettings = FlameSettings()
