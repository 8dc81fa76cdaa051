"""A policy taken out of its checkpoint: a small file of its own, or an ONNX model.

Must not know: the command line, how anything is shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, format_shell, replace_suffix
from rlflame.fleet import factory
from rlflame.rollout.policy import Policy
from rlflame.rollout.spec import Float32
from rlflame.storage import checkpoint, onnx_export, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, make_evaluation_task

OBSERVATION_COUNT = 1000
#: What rounding may come to where another library multiplies.
TOLERANCE = 1e-5


def check_target(file: Path, out: Path, onnx: bool) -> None:
    """What cannot be meant, before anything is written."""
    suffix = ".onnx" if onnx else ".safetensors"
    if out.suffix.lower() != suffix:
        raise ConfigError(
            f"-o {str(out)!r} does not end {suffix}.",
            format_shell("-o", replace_suffix(out, suffix, "policy")),
        )
    if out.exists() and out.samefile(file):
        raise ConfigError(
            f"-o {str(out)!r} is the checkpoint itself, which holds more than its policy.",
            format_shell("-o", out.with_name(f"small{suffix}")),
        )


def write_policy(source: Checkpoint, out: Path) -> int:
    """The policy with its recipe and its recorded evaluation; how many bytes that is."""
    checkpoint.save(out, checkpoint.make_policy_checkpoint(source, source.evaluation))
    return out.stat().st_size


def write_onnx(source: Checkpoint, out: Path) -> bytes:
    """The model, written whole or not at all."""
    learning = source.recipe.learning
    metadata = {
        "environment": source.env.id,
        "algorithm": learning.algorithm,
        "steps": str(source.progress.steps),
        "digest": source.digest,
    }
    data = onnx_export.build_onnx_model(source.env, source.policy_spec, source.policy, metadata)
    safetensors_file.write_atomically(out, data)
    return data


def measure_onnx_difference(source: Checkpoint, data: bytes) -> float:
    """The largest one between the model and the policy over observations that it meets."""
    policy = Policy(source.policy_spec, source.policy)
    return onnx_export.measure_largest_difference(
        data, source.env, policy, sample_observations(source, OBSERVATION_COUNT)
    )


def sample_observations(source: Checkpoint, count: int) -> Float32:
    """The first observations of an evaluation's episodes, one episode after the other.

    A worker process steps the environment: one that hangs inside a C library stops for no Ctrl-C.
    """
    width = source.policy_spec.width
    chunks: list[Float32] = []
    number = 0
    with factory.make_fleet(
        RuntimeSettings(fleet="local", workers=1), 1, lambda event: None
    ) as fleet:
        name = fleet.put(source.policy)
        while number < count:
            first = len(chunks)
            plan = EvaluationPlan(width, max_episode_steps=count)
            rollout_task = make_evaluation_task(
                source.env, source.policy_spec, plan, first * width, width
            )
            submission = fleet.submit([replace(rollout_task, policy_id=name, record=True)])
            try:
                (fragment,) = submission
            finally:
                submission.cancel()
            episodes = [
                fragment.observations[:length, row] for row, length in enumerate(fragment.lengths)
            ]
            chunks.append(np.concatenate(episodes))
            number += len(chunks[-1])
    observations: Float32 = np.concatenate(chunks)[:count]
    return observations
