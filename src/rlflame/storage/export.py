"""A policy taken out of its checkpoint: a small file of its own, or an ONNX model.

Must not know: the command line, how anything is shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, ending, shell
from rlflame.fleet import factory
from rlflame.rollout.policy import Policy
from rlflame.rollout.spec import Float32
from rlflame.storage import checkpoint, onnx_export, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, task

REPLAYED = 1000
#: What rounding may come to where another library multiplies.
TOLERANCE = 1e-5


def check_target(file: Path, out: Path, onnx: bool) -> None:
    """What cannot be meant, before anything is written."""
    wanted = ".onnx" if onnx else ".safetensors"
    if out.suffix.lower() != wanted:
        raise ConfigError(
            f"-o {str(out)!r} does not end {wanted}.", shell("-o", ending(out, wanted, "policy"))
        )
    if out.exists() and out.samefile(file):
        raise ConfigError(
            f"-o {str(out)!r} is the checkpoint itself, which holds more than its policy.",
            shell("-o", out.with_name(f"small{wanted}")),
        )


def write_policy(source: Checkpoint, out: Path) -> int:
    """The policy with its recipe and its recorded evaluation; how many bytes that is."""
    checkpoint.save(out, checkpoint.policy_only(source, source.evaluation))
    return out.stat().st_size


def write_onnx(source: Checkpoint, out: Path) -> bytes:
    """The model, written whole or not at all."""
    learning = source.recipe.learning
    said = {
        "environment": source.env.id,
        "algorithm": learning.algorithm,
        "steps": str(source.progress.steps),
        "digest": source.digest,
    }
    data = onnx_export.model(source.env, source.policy_spec, source.policy, said)
    safetensors_file.write_atomically(out, data)
    return data


def difference(source: Checkpoint, data: bytes) -> float:
    """The largest one between the model and the policy over observations that it meets."""
    policy = Policy(source.policy_spec, source.policy)
    return onnx_export.largest_difference(data, source.env, policy, met(source, REPLAYED))


def met(source: Checkpoint, count: int) -> Float32:
    """The first observations of an evaluation's episodes, one episode after the other.

    A worker process steps the environment: one that hangs inside a C library stops for no Ctrl-C.
    """
    width = source.policy_spec.width
    found: list[Float32] = []
    number = 0
    with factory.fleet(RuntimeSettings(fleet="local", workers=1), 1, lambda event: None) as fleet:
        name = fleet.put(source.policy)
        while number < count:
            first = len(found)
            plan = EvaluationPlan(width, max_episode_steps=count)
            asked = task(source.env, source.policy_spec, plan, first * width, width)
            submission = fleet.submit([replace(asked, policy_id=name, record=True)])
            try:
                (fragment,) = submission
            finally:
                submission.cancel()
            played = [
                fragment.observations[:length, row] for row, length in enumerate(fragment.lengths)
            ]
            found.append(np.concatenate(played))
            number += len(found[-1])
    observations: Float32 = np.concatenate(found)[:count]
    return observations
