"""One .safetensors file that holds a run, or a policy alone; written atomically, verified on load.

Nothing is ever unpickled or executed: a header of JSON strings and plain tensors, each checked
against what the recipe implies before it is used. Must not know: the loop, run folders, display.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from rlflame import __version__
from rlflame.config import Recipe
from rlflame.errors import CheckpointError
from rlflame.evaluate import EvaluationRecord
from rlflame.rollout import wire
from rlflame.rollout.policy import expected_shapes
from rlflame.rollout.spec import Array, EnvSpec, EnvState, PolicyArrays, PolicySpec
from rlflame.trainer import Progress, Snapshot

FORMAT = 1
_BLANK = "0" * 64
_HEADER_LIMIT = 100_000_000
#: Differences that can change bits; the rest of a fingerprint is for the reader.
_BIT_FIELDS = ("core", "simd", "system", "libc", "numpy", "gymnasium", "mujoco", "box2d")


@dataclass(frozen=True)
class Checkpoint:
    """What a file says: a policy with its recipe, and in a full checkpoint the whole run."""

    recipe: Recipe
    env: EnvSpec
    policy_spec: PolicySpec
    policy: PolicyArrays
    progress: Progress
    fingerprint: dict[str, str]
    best: EvaluationRecord | None = None
    evaluation: EvaluationRecord | None = None
    #: Lines of metrics.jsonl and episodes.csv that belong to this state.
    committed: tuple[int, int] = (0, 0)
    snapshot: Snapshot | None = None
    state_digest: str = ""
    digest: str = ""

    @property
    def resumable(self) -> bool:
        return self.snapshot is not None


def save(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Write the file so that at every moment either the old one or the new one is there."""
    tensors = tensors_of(checkpoint)
    state_digest = _state_digest(tensors, checkpoint.progress)
    digest = _digest(state_digest, checkpoint.recipe)
    metadata = {
        "format": str(FORMAT),
        "kind": "checkpoint" if checkpoint.resumable else "policy",
        "rlflame": __version__,
        "recipe": checkpoint.recipe.model_dump_json(),
        "environment": json.dumps(asdict(checkpoint.env)),
        "policy": json.dumps(asdict(checkpoint.policy_spec)),
        "progress": json.dumps(asdict(checkpoint.progress)),
        "committed": json.dumps(checkpoint.committed),
        "fingerprint": json.dumps(checkpoint.fingerprint),
        "best": json.dumps(checkpoint.best and checkpoint.best.as_dict()),
        "evaluation": json.dumps(checkpoint.evaluation and checkpoint.evaluation.as_dict()),
        "state_digest": state_digest,
        "digest": digest,
        "checksum": _BLANK,
    }
    data = bytearray(safetensors.numpy.save(tensors, metadata))
    position = _checksum_position(data)
    data[position : position + 64] = hashlib.sha256(data).hexdigest().encode()
    write_atomically(path, data)
    return replace(checkpoint, state_digest=state_digest, digest=digest)


def load(path: Path) -> Checkpoint:
    """Read and verify a file. Raises CheckpointError with a sentence for anything amiss."""
    data = _read(path)
    try:
        metadata = _verified_metadata(path, data)
        tensors = safetensors.numpy.load(bytes(data))
        return _parse(metadata, tensors)
    except CheckpointError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # whatever a crafted header provokes is one sentence to the user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged: {reason[:300]}.", "use an earlier checkpoint of the same run"
        ) from error


def policy_only(checkpoint: Checkpoint, evaluation: EvaluationRecord | None) -> Checkpoint:
    """The small file that eval and render need, with the evaluation it is known for."""
    return replace(
        checkpoint, snapshot=None, committed=(0, 0), best=evaluation, evaluation=evaluation
    )


def fingerprint_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """What differs between two machines that can change bits, as `name: one -> other`."""
    return [
        f"{name}: {a.get(name, '?')} -> {b.get(name, '?')}"
        for name in _BIT_FIELDS
        if a.get(name) != b.get(name)
    ]


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Temporary file in the same folder, flushed to disk, renamed, and the folder flushed."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensors_of(checkpoint: Checkpoint) -> dict[str, Array]:
    tensors = {f"policy.{name}": array for name, array in checkpoint.policy.items()}
    snapshot = checkpoint.snapshot
    if snapshot is not None:
        tensors |= {f"learner.{name}": array for name, array in snapshot.learner.items()}
        states = np.frombuffer(wire.encode(snapshot.states), np.uint8)
        tensors["envs"] = states
        if snapshot.behaviour is not None:
            tensors |= {f"behaviour.{name}": a for name, a in snapshot.behaviour.items()}
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _state_digest(tensors: Mapping[str, Array], progress: Progress) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    digest.update(json.dumps(asdict(progress), sort_keys=True).encode())
    return digest.hexdigest()


def _digest(state_digest: str, recipe: Recipe) -> str:
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{state_digest}|{canonical}".encode()).hexdigest()


def _read(path: Path) -> bytearray:
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist"
            raise CheckpointError(f"{path} {reason}.", "rlflame runs lists the runs here")
        return bytearray(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", "") from error


def _checksum_position(data: bytearray) -> int:
    """Where the 64 digits of the checksum stand in the header, found once and only once."""
    (length,) = struct.unpack_from("<Q", data)
    header = bytes(data[8 : 8 + length])
    key = b'"checksum":"'
    if header.count(key) != 1:
        raise CheckpointError("it has no single checksum")
    return 8 + header.index(key) + len(key)


def _verified_metadata(path: Path, data: bytearray) -> dict[str, str]:
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise CheckpointError(
            f"{path} is a pickle or zip file, which rlflame never opens.",
            "rlflame reads only its own .safetensors files",
        )
    (length,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    if length < 2 or length > min(_HEADER_LIMIT, len(data) - 8) or data[8:9] != b"{":
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file "
            f"(a header of {length} bytes in a file of {len(data)}).",
            "use an earlier checkpoint of the same run",
        )
    header = json.loads(bytes(data[8 : 8 + length]))
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or "format" not in metadata or "recipe" not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but not one of rlflame's.",
            "rlflame reads the files that rlflame train writes",
        )
    if not metadata["format"].isdigit() or int(metadata["format"]) > FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata['format'][:20]}; this rlflame reads up to {FORMAT}.",
            "install a newer rlflame",
        )
    position = _checksum_position(data)
    found = bytes(data[position : position + 64])
    data[position : position + 64] = _BLANK.encode()
    if hashlib.sha256(data).hexdigest().encode() != found:
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match its content.",
            "use an earlier checkpoint of the same run",
        )
    return metadata


def _parse(metadata: Mapping[str, str], tensors: dict[str, Array]) -> Checkpoint:
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"tensor {name} holds NaN or infinity")
    recipe = Recipe.model_validate_json(metadata["recipe"])
    env = EnvSpec(**_tuples(json.loads(metadata["environment"])))
    spec = PolicySpec(**_tuples(json.loads(metadata["policy"])))
    progress = Progress(**json.loads(metadata["progress"]))
    policy = _group(tensors, "policy.")
    _check_shapes(policy, expected_shapes(spec), "policy")
    snapshot = None
    if metadata["kind"] == "checkpoint":
        behaviour = _group(tensors, "behaviour.")
        if behaviour:
            _check_shapes(behaviour, expected_shapes(spec), "behaviour")
        states = _states(tensors["envs"], recipe)
        learner = _group(tensors, "learner.")
        snapshot = Snapshot(progress, policy, learner, states, behaviour or None)
    committed = json.loads(metadata["committed"])
    checkpoint = Checkpoint(
        recipe=recipe,
        env=env,
        policy_spec=spec,
        policy=policy,
        progress=progress,
        fingerprint=dict(json.loads(metadata["fingerprint"])),
        best=_record(metadata["best"]),
        evaluation=_record(metadata["evaluation"]),
        committed=(int(committed[0]), int(committed[1])),
        snapshot=snapshot,
        state_digest=metadata["state_digest"],
        digest=metadata["digest"],
    )
    if _state_digest(tensors_of(checkpoint), progress) != metadata["state_digest"]:
        raise ValueError("its tensors are not those its digest was made of")
    if _digest(metadata["state_digest"], recipe) != metadata["digest"]:
        raise ValueError("its recipe is not the one its digest was made of")
    return checkpoint


def _group(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {
        name[len(prefix) :]: array for name, array in tensors.items() if name.startswith(prefix)
    }


def _check_shapes(
    arrays: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]], group: str
) -> None:
    if arrays.keys() != expected.keys():
        odd = sorted(arrays.keys() ^ expected.keys())
        raise ValueError(f"{group} tensors missing or unknown: {', '.join(odd[:5])}")
    for name, shape in expected.items():
        if arrays[name].shape != shape or arrays[name].dtype != np.float32:
            raise ValueError(
                f"tensor {group}.{name} is {arrays[name].dtype} {arrays[name].shape}, "
                f"expected float32 {shape}"
            )


def _states(data: Array, recipe: Recipe) -> tuple[tuple[EnvState, ...], ...]:
    rollout = recipe.learning.rollout
    states = wire.decode(data.tobytes())
    rows = rollout.envs_per_slot if rollout.unit == "steps" else 0
    fits = isinstance(states, tuple) and len(states) == rollout.num_slots
    for slot in states if fits else ():
        fits = fits and len(slot) == rows and all(isinstance(s, EnvState) for s in slot)
    if not fits:
        raise ValueError("its environment states do not fit its recipe")
    return states


def _record(text: str) -> EvaluationRecord | None:
    value = json.loads(text)
    return EvaluationRecord(**_tuples(value)) if value is not None else None


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; the frozen values that come from it do."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
