"""Reads and writes checkpoints: the full state of a run, or only a policy.

Strings and tensors are checked against the recipe before they are used. The complete segments of a
replay buffer are stored in separate files (see `replay_segments.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter

from rlflame.config import nested_dict
from rlflame.config.recipe import EnvironmentSettings, LearningSettings, Recipe
from rlflame.rollout import wire
from rlflame.rollout.policy import compute_array_shapes
from rlflame.rollout.space_codec import find_choice_spans
from rlflame.rollout.task import (
    Array,
    EnvSpec,
    EnvState,
    PolicyArrays,
    PolicySpec,
    WrapperSpec,
)
from rlflame.storage import replay_segments, safetensors_file
from rlflame.storage.run_reader import MAX_COUNT, Count
from rlflame.storage.space_validation import has_valid_spaces
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import EnvStates, Progress, Snapshot

_FIELDS = {
    *("kind", "recipe", "environment", "policy", "progress", "committed", "fingerprint"),
    *("best", "evaluation", "state_digest", "digest"),
}
#: Not flattened, because the keys come from the environment and may contain dots.
_KWARGS = "learning.environment.kwargs"
T = TypeVar("T")
#: The number and digest of each segment that a checkpoint needs.
_SegmentIds = tuple[tuple[Count, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], ...]


@dataclass(frozen=True)
class Checkpoint:
    """A policy and its recipe; a full checkpoint also has the state of the run."""

    recipe: Recipe
    env: EnvSpec
    policy_spec: PolicySpec
    policy: PolicyArrays
    progress: Progress
    fingerprint: dict[str, str]
    best: EvaluationRecord | None = None
    evaluation: EvaluationRecord | None = None
    #: The numbers of lines in metrics.jsonl and episodes.csv that belong to this state.
    line_counts: tuple[int, int] = (0, 0)
    snapshot: Snapshot | None = None
    state_digest: str = ""
    digest: str = ""

    @property
    def resumable(self) -> bool:
        return self.snapshot is not None


def save(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Write a checkpoint atomically, and return it with its digests."""
    tensors = collect_tensors(checkpoint)
    recipe = checkpoint.recipe.model_dump_json()
    state_digest = _hash_state(tensors, checkpoint.progress)
    digest = _hash_recipe(state_digest, recipe)
    env = asdict(checkpoint.env)
    del env["modules"]  # each command decides which modules an environment may import
    if env["episodes"] == "auto":
        del env["episodes"]
    metadata = {
        "kind": "checkpoint" if checkpoint.resumable else "policy",
        "recipe": recipe,
        "environment": json.dumps(env),
        "policy": json.dumps(asdict(checkpoint.policy_spec)),
        "progress": json.dumps(asdict(checkpoint.progress)),
        "committed": json.dumps(checkpoint.line_counts),
        "fingerprint": json.dumps(checkpoint.fingerprint),
        "best": json.dumps(checkpoint.best and checkpoint.best.as_dict()),
        "evaluation": json.dumps(checkpoint.evaluation and checkpoint.evaluation.as_dict()),
        "state_digest": state_digest,
        "digest": digest,
    }
    if checkpoint.snapshot is not None and checkpoint.snapshot.segments:
        metadata["segments"] = json.dumps(
            [(segment.number, segment.digest) for segment in checkpoint.snapshot.segments]
        )
    safetensors_file.write(path, tensors, metadata)
    return replace(checkpoint, state_digest=state_digest, digest=digest)


def compute_state_digest(checkpoint: Checkpoint) -> str:
    """Compute the digest of the state, which may differ from `state_digest`."""
    return _hash_state(collect_tensors(checkpoint), checkpoint.progress)


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; raise CheckpointError for any problem."""
    with safetensors_file.report_read_errors(path):
        return _parse(path, *safetensors_file.read(path, "recipe", _FIELDS, _check_header))


def read_segment_names(path: Path) -> set[str]:
    """Read the names of a checkpoint's segment files from its header.

    Raises OSError if the checkpoint exists but cannot be read: it may need any of the segments.
    """
    try:
        segment_ids = _parse_json(
            _SegmentIds, safetensors_file.read_metadata(path).get("segments", "[]")
        )
    except ValueError:  # not a resumable checkpoint
        return set()
    return {replay_segments.format_segment_name(*segment) for segment in segment_ids}


def make_policy_checkpoint(
    checkpoint: Checkpoint, evaluation: EvaluationRecord | None
) -> Checkpoint:
    """Make a small checkpoint with only the policy and its evaluation."""
    return replace(
        checkpoint, snapshot=None, line_counts=(0, 0), best=evaluation, evaluation=evaluation
    )


def collect_tensors(checkpoint: Checkpoint) -> dict[str, Array]:
    tensors = {f"policy.{name}": array for name, array in checkpoint.policy.items()}
    snapshot = checkpoint.snapshot
    if snapshot is not None:
        tensors |= {f"learner.{name}": array for name, array in snapshot.learner.items()}
        states = np.frombuffer(wire.encode(snapshot.states), np.uint8)
        tensors["envs"] = states
        if snapshot.behaviour is not None:
            tensors |= {f"behaviour.{name}": a for name, a in snapshot.behaviour.items()}
    # Not np.ascontiguousarray, which would turn 0-d counters into 1-d arrays.
    return {name: np.asarray(array, order="C") for name, array in tensors.items()}


def _hash_state(tensors: Mapping[str, Array], progress: Progress) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    digest.update(json.dumps(asdict(progress), sort_keys=True).encode())
    return digest.hexdigest()


def _hash_recipe(state_digest: str, recipe: str) -> str:
    """Return the hash of the state digest and the recipe.

    The recipe is hashed as it was saved, so that old files stay valid when settings are added.
    """
    canonical = json.dumps(json.loads(recipe), sort_keys=True)
    return hashlib.sha256(f"{state_digest}|{canonical}".encode()).hexdigest()


def _check_header(metadata: Mapping[str, str], layouts: safetensors_file.Layouts) -> None:
    """Check that the recipe, the policy and the layouts of the tensors match."""
    _, _, spec = _parse_policy(metadata)
    actual = {name: (layout.dtype, layout.shape) for name, layout in layouts.items()}
    groups = ["policy"]
    if metadata["kind"] == "checkpoint":
        actual = {n: v for n, v in actual.items() if not n.startswith("learner.") and n != "envs"}
        groups += ["behaviour"] if _select(actual, "behaviour.") else []
    shapes = compute_array_shapes(spec).items()
    expected = {f"{group}.{name}": ("F32", shape) for group in groups for name, shape in shapes}
    if differing := [n for n in actual | expected if actual.get(n) != expected.get(n)]:
        names = ", ".join(sorted(differing)[:5])
        raise ValueError(f"some tensors are missing, unknown or of the wrong type: {names}")


def _parse(path: Path, metadata: Mapping[str, str], tensors: dict[str, Array]) -> Checkpoint:
    recipe, env, spec = _parse_policy(metadata)
    progress = _parse_json(Progress, metadata["progress"])
    _check_progress(progress, recipe)
    policy = _select(tensors, "policy.")
    snapshot = None
    if metadata["kind"] == "checkpoint":
        behaviour = _select(tensors, "behaviour.")
        states = _decode_states(tensors.get("envs"), recipe, env)
        learner = _select(tensors, "learner.")
        segment_ids = _parse_json(_SegmentIds, metadata.get("segments", "[]"))
        segments = tuple(
            replay_segments.make_lazy_segment(replay_segments.find_segment_folder(path), *segment)
            for segment in segment_ids
        )
        snapshot = Snapshot(progress, policy, learner, states, behaviour or None, segments)
    checkpoint = Checkpoint(
        recipe=recipe,
        env=env,
        policy_spec=spec,
        policy=policy,
        progress=progress,
        fingerprint=_parse_json(dict[str, str], metadata["fingerprint"]),
        best=_parse_record("best", metadata["best"]),
        evaluation=_parse_record("evaluation", metadata["evaluation"]),
        line_counts=_parse_json(tuple[Count, Count], metadata["committed"]),
        snapshot=snapshot,
        state_digest=metadata["state_digest"],
        digest=metadata["digest"],
    )
    if _hash_state(collect_tensors(checkpoint), progress) != metadata["state_digest"]:
        raise ValueError("its tensors do not match its state digest")
    if _hash_recipe(metadata["state_digest"], metadata["recipe"]) != metadata["digest"]:
        raise ValueError("its recipe does not match its digest")
    return checkpoint


def _parse_policy(metadata: Mapping[str, str]) -> tuple[Recipe, EnvSpec, PolicySpec]:
    """Parse the recipe, the environment and the policy; check that they match."""
    recipe = _parse_recipe(metadata["recipe"])
    env: EnvSpec = _parse_json(EnvSpec, metadata["environment"])
    spec: PolicySpec = _parse_json(PolicySpec, metadata["policy"])
    _check_coherent(recipe, env, spec)
    return recipe, replace(env, modules=()), spec


def _select(entries: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {
        name[len(prefix) :]: entry for name, entry in entries.items() if name.startswith(prefix)
    }


def _check_coherent(recipe: Recipe, env: EnvSpec, spec: PolicySpec) -> None:
    """Check that the specs of the environment and policy match the recipe.

    The specs determine the sizes of arrays, and a crafted file can contain any values. If the
    recipe sets no time limit, the environment spec must have none either: wherever the policy runs,
    the registration of the environment sets the limit.
    """
    settings = recipe.learning.environment
    names = ("id", "kwargs", "max_episode_steps", "episodes")
    # Compare them as text, because True == 1 in Python.
    expected, actual = (
        json.dumps(
            {name: getattr(source, name) for name in names}
            | {"wrappers": [asdict(wrapper) for wrapper in wrappers]},
            sort_keys=True,
        )
        for source, wrappers in ((settings, make_wrapper_specs(settings)), (env, env.wrappers))
    )
    if actual != expected:
        raise ValueError(f"its environment is {actual:.160}, but its recipe has {expected:.160}")
    has_masks = env.mask_source != "none" and settings.action_mask == "off"
    if spec != build_policy_spec(recipe.learning, env) or not has_valid_spaces(env) or has_masks:
        raise ValueError("its policy does not fit its environment and recipe")


def make_wrapper_specs(settings: EnvironmentSettings) -> tuple[WrapperSpec, ...]:
    return tuple(WrapperSpec(wrapper.name, dict(wrapper.kwargs)) for wrapper in settings.wrappers)


def build_policy_spec(learning: LearningSettings, env: EnvSpec) -> PolicySpec:
    """Build the policy spec for a recipe and a compatible environment."""
    network = learning.network
    choice_spans = find_choice_spans(env.observation_leaves)
    return PolicySpec(
        action_kind=env.action_kind,
        observation_size=env.observation_size,
        action_size=env.action_size,
        action_low=env.action_low,
        action_high=env.action_high,
        hidden=tuple(network.hidden),
        activation=network.activation,
        normalise=network.normalise_observations and choice_spans != ((0, env.observation_size),),
        observation_clip=network.observation_clip,
        width=learning.rollout.width,
        squash=learning.traits.squashed_actions,
        exploration=network.exploration,
        exploration_interval=network.exploration_interval,
        action_counts=env.action_counts,
        mask_size=env.mask_size,
        choice_spans=choice_spans,
    )


def _check_progress(progress: Progress, recipe: Recipe) -> None:
    """Check that the counters are possible for a run of this recipe."""
    rollout, every_steps = recipe.learning.rollout, recipe.evaluation.every_steps
    counters = (progress.iteration, progress.steps, progress.episodes, progress.evaluations)
    per_iteration = rollout.columns * rollout.steps
    if (
        not all(0 <= count < MAX_COUNT for count in counters)
        or not progress.iteration <= progress.steps <= progress.iteration * per_iteration
        or progress.episodes > progress.steps
        or progress.evaluations > (progress.steps // every_steps if every_steps is not None else 0)
    ):
        raise ValueError("its progress is impossible for its recipe")


def _decode_states(data: Array | None, recipe: Recipe, env: EnvSpec) -> EnvStates:
    rollout = recipe.learning.rollout
    states = wire.decode(data.tobytes()) if data is not None else None
    rows = rollout.envs_per_slot if rollout.unit == "steps" else 0
    if (
        isinstance(states, tuple)
        and len(states) == rollout.num_slots
        and all(isinstance(slot, tuple) and len(slot) == rows for slot in states)
        and all(
            isinstance(state, EnvState) and _is_valid_state(state, env) for state in sum(states, ())
        )
    ):
        return states
    raise ValueError("its environment states do not fit its recipe")


def _is_valid_state(state: EnvState, env: EnvSpec) -> bool:
    if state.observation.shape not in ((0,), (env.row_size,)):
        return False
    if state.kind == "fresh":
        return state.elapsed == 0
    steps = 1 if state.kind == "mujoco" else state.elapsed
    is_discrete = env.action_kind == "discrete"
    shape = (steps,) if is_discrete else (steps, env.action_size)
    if state.actions.dtype != (np.int64 if is_discrete else np.float32):
        return False
    return state.elapsed > 0 and state.actions.shape == shape


def _parse_record(name: str, text: str) -> EvaluationRecord | None:
    record: EvaluationRecord | None = _parse_json(EvaluationRecord | None, text)
    if record is not None and (fault := record.find_fault()) is not None:
        raise ValueError(f"its {name} record {fault}")
    return record


def _parse_json(kind: Any, text: str) -> Any:
    """Parse JSON; reject unknown fields and values of the wrong type."""
    value = _make_adapter(kind).validate_json(text, strict=True)
    names = {field.name for field in fields(value)} if is_dataclass(value) else None
    safetensors_file.check_json(text, names)
    return value


def _parse_recipe(text: str) -> Recipe:
    recipe = Recipe.model_validate_json(text)
    settings = recipe.model_dump(mode="json")
    # Reject coerced values, such as text that is read as a number.
    for name, value in nested_dict.flatten(safetensors_file.check_json(text), leaves=[_KWARGS]):
        meaning = nested_dict.get_nested(settings, name)
        if json.dumps(value, sort_keys=True) != json.dumps(meaning, sort_keys=True):
            raise ValueError(f"recipe.{name} is {value!r:.80}, but is read as {meaning!r:.80}")
    return recipe


@cache
def _make_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
