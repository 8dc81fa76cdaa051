"""The runtime, which decides the speed: where a run goes, how it is shown and what is kept.

No setting here may change a bit of what is learned.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]


class SettingsModel(BaseModel):
    """Base of every part of a config: frozen, without unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        """Python would take true for 1; a checkpoint cannot hold more than 64 bits."""
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, int) and abs(part) >= 2**63:
                raise ValueError(f"a number of {part.bit_length()} bits is too large, 63 fit")
            annotation = cls.model_fields[str(info.field_name)].annotation
            if isinstance(part, bool) and bool not in (annotation, *get_args(annotation)):
                raise ValueError("true and false are no values for it")
        return value


class FlameSettings(SettingsModel):
    """How a run uses a Flame cluster."""

    cpu: int | None = Field(
        None, ge=0, le=1024, description="Processors per executor; by default the cluster's own."
    )
    memory: str | None = Field(
        None,
        pattern=r"^[0-9]+[kmgtKMGT]?$",
        description="Memory per executor, such as 2g; by default the cluster's own.",
    )
    min_executors: int = Field(0, ge=0, le=4096, description="Executors to start at once.")
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
        (), description="Packages to install for your environment."
    )
    template: str | None = Field(None, description="Application template; by default flmrun.")
    start_deadline_s: float = Field(300.0, gt=0.0, description="Longest wait for an executor.")
    task_deadline_s: float = Field(
        600.0, gt=0.0, description="A slower fragment goes to another executor, max_retries times."
    )
    reconnect_s: float = Field(
        120.0, ge=0.0, description="Longest outage of session manager or cache during a run."
    )
    delay_release_s: int = Field(120, ge=1, le=86_400, description="How long idle executors stay.")


class RuntimeSettings(SettingsModel):
    """What decides the speed, and changes no bit."""

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
    keep_checkpoints: Positive = Field(3, description="Newest checkpoints kept.")
    video_every_steps: Positive | None = Field(
        None, description="Steps between short films of the policy, in videos/; absent: none."
    )
    step_deadline_s: float = Field(
        60.0, gt=0.0, description="An environment that takes longer for one step counts as hung."
    )
    max_retries: int = Field(3, ge=0, le=1000, description="Retries of a lost worker's fragment.")
    progress: Literal["auto", "live", "plain", "json", "quiet"] = Field(
        "auto", description="How progress is shown; auto is live on a terminal, plain otherwise."
    )
    tensorboard: bool = Field(False, description="Write curves for TensorBoard to the run folder.")
    debug: bool = Field(False, description="Show tracebacks and what environments print.")
    flame: FlameSettings = FlameSettings()
