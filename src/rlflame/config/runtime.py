"""The runtime: where a run executes, how it shows progress and what it keeps.

These settings affect the speed and must never change the weights.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]


class SettingsModel(BaseModel):
    """Base class for all config sections, which are frozen and reject unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject booleans in place of numbers, and integers that do not fit in 64 bits."""
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
        None, ge=0, le=1024, description="CPUs per executor. If unset, the default of the cluster."
    )
    memory: str | None = Field(
        None,
        pattern=r"^[0-9]+[kmgtKMGT]?$",
        description="Memory per executor, such as 2g. If unset, the default of the cluster.",
    )
    min_executors: int = Field(0, ge=0, le=4096, description="Minimum number of executors.")
    python_version: str | None = Field(
        None,
        pattern=r"^3\.[0-9]+$",
        description="Python version of the executors, such as 3.12. If unset, the version of this "
        "machine if executors install packages, and their own version otherwise.",
    )
    dependencies: Literal["auto", "prepared", "install"] = Field(
        "auto",
        description="Whether executors already have numpy and Gymnasium (prepared) or install them "
        "for each run (install). auto installs them only if needed.",
    )
    extra_dependencies: tuple[str, ...] = Field(
        (), description="Additional packages that executors install for your environment."
    )
    template: str | None = Field(None, description="Flame application template. If unset, flmrun.")
    start_deadline_s: float = Field(300.0, gt=0.0, description="Seconds to wait for an executor.")
    task_deadline_s: float = Field(
        600.0,
        gt=0.0,
        description="Seconds until an unfinished task is sent again, up to max_retries times.",
    )
    reconnect_s: float = Field(
        120.0, ge=0.0, description="Longest tolerated outage of Flame's services, in seconds."
    )
    delay_release_s: int = Field(
        120, ge=1, le=86_400, description="Seconds after which an idle executor is released."
    )


class RuntimeSettings(SettingsModel):
    """Settings that affect the speed of a run but never its weights."""

    fleet: Literal["auto", "local", "flame", "inline"] = Field(
        "auto",
        description="Where rollouts run: in local worker processes (local), on a Flame cluster "
        "(flame) or in the main process (inline). auto is local if no Flame cluster is "
        "configured. Otherwise, rlflame times both and continues with the faster one.",
    )
    workers: Positive | None = Field(
        None,
        le=4096,
        description="Number of local worker processes, by default one per usable core. On Flame, "
        "the maximum number of executors, by default all that fit.",
    )
    learners: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="Number of processes that compute gradients. With auto, rlflame times one "
        "learner and several, and continues with the faster choice.",
    )
    learner_deadline_s: float = Field(
        60.0, gt=0.0, description="Seconds to wait for a learner before it counts as hung."
    )
    compare_learners_every: Positive | None = Field(
        None, description="Updates between comparisons of learners' states. If unset, no checks."
    )
    env_file: str | None = Field(
        None,
        description="Python file that defines your environment. It is sent to all workers. In a "
        "config file, the path is relative to that file.",
    )
    out: str | None = Field(
        None, description="Run folder. If unset, a new folder runs/ENVIRONMENT-ALGORITHM-SEED."
    )
    checkpoint_every_steps: Positive = Field(
        100_000, description="Steps between checkpoints. A run also saves one at its last step."
    )
    checkpoint_every_minutes: float = Field(
        5.0, gt=0.0, description="Minutes between checkpoints, for runs whose steps are slow."
    )
    keep_checkpoints: Positive = Field(3, description="Number of recent checkpoints to keep.")
    video_every_steps: Positive | None = Field(
        None, description="Steps between short videos, in videos/. If unset, no videos."
    )
    step_deadline_s: float = Field(
        60.0, gt=0.0, description="Seconds after which an environment step counts as hung."
    )
    max_retries: int = Field(3, ge=0, le=1000, description="Retries per task if workers are lost.")
    progress: Literal["auto", "live", "plain", "json", "quiet"] = Field(
        "auto", description="Progress display. auto is live on a terminal and plain otherwise."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard logs to the run folder.")
    debug: bool = Field(False, description="Show tracebacks and the output of environments.")
    flame: FlameSettings = FlameSettings()
