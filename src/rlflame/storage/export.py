"""Exports a policy without its run, as a small policy file or an ONNX model.

An ONNX model maps a batch of observations to deterministic actions. The model includes the
observation normalisation, the argmax or the tanh squashing, and the action bounds. The `onnx` and
`onnxruntime` packages are an optional dependency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, check_extra, format_shell, replace_suffix
from rlflame.fleet import factory
from rlflame.rollout.policy import Policy
from rlflame.rollout.task import Array, EnvSpec, Float32, PolicyArrays, PolicySpec
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, make_evaluation_task

OBSERVATION_COUNT = 1000
#: The largest rounding difference allowed between numpy and ONNX Runtime.
TOLERANCE = 1e-5
INPUT, OUTPUT = "observation", "action"
#: Old versions of the operator set and the file format, which most runtimes support.
_OPSET, _IR = 17, 8


def check_onnx_available() -> None:
    for package in ("onnx", "onnxruntime"):
        check_extra(package, "no ONNX model can be written", "onnx")


def check_target(file: Path, out: Path, onnx: bool) -> None:
    """Raise ConfigError if `out` has the wrong suffix or is the checkpoint."""
    suffix = ".onnx" if onnx else ".safetensors"
    if out.suffix.lower() != suffix or (out.exists() and out.samefile(file)):
        raise ConfigError(
            f"-o {str(out)!r} does not end in {suffix}, or is the checkpoint itself.",
            format_shell("-o", replace_suffix(out, f".small{suffix}", "policy")),
        )


def write_policy(source: Checkpoint, out: Path) -> None:
    """Write the policy with its recipe and its recorded evaluation."""
    checkpoint.save(out, checkpoint.make_policy_checkpoint(source, source.evaluation))


def write_onnx(source: Checkpoint, out: Path) -> bytes:
    """Write the policy as an ONNX model, and return the bytes of the model."""
    learning = source.recipe.learning
    metadata = {
        "environment": source.env.id,
        "algorithm": learning.algorithm,
        "steps": str(source.progress.steps),
        "digest": source.digest,
    }
    data = build_onnx_model(source.env, source.policy_spec, source.policy, metadata)
    safetensors_file.write_atomically(out, data)
    return data


def measure_onnx_difference(source: Checkpoint, data: bytes) -> float:
    """Compare the actions of the model and the policy in evaluation episodes.

    Returns the largest difference.
    """
    policy = Policy(source.policy_spec, source.policy)
    return measure_largest_difference(
        data, source.env, policy, sample_observations(source, OBSERVATION_COUNT)
    )


def sample_observations(source: Checkpoint, count: int) -> Float32:
    """Return the first `count` observations from evaluation episodes.

    The environment runs in a worker process, because Ctrl-C cannot interrupt a C library that
    hangs.
    """
    width = source.policy_spec.width
    episodes: list[Float32] = []
    plan = EvaluationPlan(width, max_episode_steps=count)
    runtime = RuntimeSettings(fleet="local", workers=1)
    with factory.make_fleet(runtime, 1, lambda event: None) as fleet:
        name = fleet.put(source.policy)
        while sum(map(len, episodes)) < count:
            task = make_evaluation_task(source.env, source.policy_spec, plan, len(episodes), width)
            (fragment,) = fleet.submit([replace(task, policy_id=name, record=True)])
            episodes += [
                fragment.observations[:length, row] for row, length in enumerate(fragment.lengths)
            ]
    observations: Float32 = np.concatenate(episodes)[:count]
    return observations


class _Graph:
    """A chain of ONNX nodes; each takes the output of the previous node."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last_output = INPUT

    def add_node(self, operator: str, *constants: Array, **attributes: Any) -> None:
        from onnx import helper, numpy_helper

        number = len(self.nodes)
        names = [f"{operator}.{number}.{k}" for k in range(len(constants))]
        self.constants += [
            numpy_helper.from_array(np.ascontiguousarray(array), name)
            for array, name in zip(constants, names, strict=True)
        ]
        out = f"{operator}.{number}"
        self.nodes.append(
            helper.make_node(operator, [self.last_output, *names], [out], **attributes)
        )
        self.last_output = out


def build_onnx_model(
    env: EnvSpec, spec: PolicySpec, arrays: PolicyArrays, metadata: Mapping[str, str]
) -> bytes:
    """Build an ONNX model with `metadata` about the policy; return its bytes."""
    from onnx import TensorProto, checker, helper

    graph = _Graph()
    if spec.normalise:
        clip = np.array(spec.observation_clip, np.float32)
        graph.add_node("Sub", arrays["normaliser.mean"])
        graph.add_node("Mul", arrays["normaliser.scale"])
        graph.add_node("Clip", -clip, clip)
    for layer in range(len(spec.hidden) + 1):
        graph.add_node("MatMul", arrays[f"actor.{layer}.weight"])
        graph.add_node("Add", arrays[f"actor.{layer}.bias"])
        if layer < len(spec.hidden):
            graph.add_node("Tanh" if spec.activation == "tanh" else "Relu")
    shape: tuple[int, ...] = ()
    if spec.action_kind == "discrete":
        graph.add_node("ArgMax", axis=1, keepdims=0)
        graph.add_node("Add", np.array(env.action_start, np.int64))
    else:
        shape = (spec.action_size,) if env.action_shape is None else env.action_shape
        _add_action_bounds(graph, spec)
        graph.add_node("Reshape", np.array((-1, *shape), np.int64))
    graph.nodes[-1].output[0] = OUTPUT
    kind = TensorProto.INT64 if spec.action_kind == "discrete" else TensorProto.FLOAT
    graph_proto = helper.make_graph(
        graph.nodes,
        "policy",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", spec.observation_size])],
        [helper.make_tensor_value_info(OUTPUT, kind, ["batch", *shape])],
        graph.constants,
    )
    model_proto = helper.make_model(
        graph_proto,
        producer_name="rlflame",
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
    )
    helper.set_model_props(model_proto, dict(metadata))
    checker.check_model(model_proto, full_check=True)
    data: bytes = model_proto.SerializeToString()
    return data


def _add_action_bounds(graph: _Graph, spec: PolicySpec) -> None:
    """Add the nodes that map the network's output to the range of the actions."""
    low, high = (np.asarray(bound, np.float32) for bound in (spec.action_low, spec.action_high))
    if spec.squash:
        # The network's outputs are the means, followed by the log standard deviations.
        start, end, axis = (np.array([number], np.int64) for number in (0, spec.action_size, 1))
        graph.add_node("Slice", start, end, axis)
        graph.add_node("Tanh")
        graph.add_node("Mul", (high - low) * np.float32(0.5))
        graph.add_node("Add", (low + high) * np.float32(0.5))
    graph.add_node("Max", low)
    graph.add_node("Min", high)


def measure_largest_difference(
    data: bytes, env: EnvSpec, policy: Policy, observations: Float32
) -> float:
    """Return the largest difference between the model's actions and the policy's.

    For actions above 1 in absolute value, the difference is relative. For discrete actions, it is
    the gap between the best logit and the logit of the model's action, so a tie counts as 0.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (model_actions,) = session.run([OUTPUT], {INPUT: observations})
    width = policy.spec.width
    batch = np.zeros((width, observations.shape[1]), np.float32)
    largest = 0.0
    for first in range(0, len(observations), width):
        chunk = observations[first : first + width]
        batch[: len(chunk)], batch[len(chunk) :] = chunk, 0.0
        chunk_actions = model_actions[first : first + width]
        if policy.spec.action_kind == "discrete":
            logits = policy.forward(batch)[: len(chunk)]
            model_logits = logits[np.arange(len(chunk)), chunk_actions - env.action_start]
            difference = logits.max(axis=1) - model_logits
        else:
            policy_actions = policy.to_environment(policy.mode(batch))[: len(chunk)]
            gaps = np.abs(policy_actions - chunk_actions.reshape(policy_actions.shape))
            difference = gaps / np.maximum(1.0, np.abs(policy_actions))
        largest = max(largest, float(difference.max()))
    return largest
