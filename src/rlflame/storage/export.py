"""Exports a policy without its run, as a small policy file or an ONNX model.

An ONNX model maps a batch of observations to deterministic actions. The model includes the
observation normalisation, the argmax or the tanh squashing, and the action bounds. Observations
have the layout of Gymnasium's `flatten_space`. If the environment masks actions, the mask is a
second input. Each part of a Dict or Tuple of actions is an output, such as `action/move`. The
`onnx` and `onnxruntime` packages are an optional dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, check_extra, format_shell, replace_suffix
from rlflame.fleet import factory
from rlflame.rollout.distributions import MASKED_LOGIT, group_actions
from rlflame.rollout.policy import Policy, make_clip_bounds
from rlflame.rollout.space_codec import format_path, list_action_leaves, list_counts
from rlflame.rollout.task import Array, EnvSpec, Float32, PolicyArrays, PolicySpec, SpaceLeaf
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, make_evaluation_task

OBSERVATION_COUNT = 1000
#: The largest rounding difference allowed between numpy and ONNX Runtime.
TOLERANCE = 1e-5
INPUT, MASK, OUTPUT = "observation", "action_mask", "action"
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
    """ONNX nodes. By default, each takes the output of the previous node."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last_output = INPUT

    def add_node(
        self, operator: str, *constants: Array, inputs: Sequence[str] = (), **attributes: Any
    ) -> str:
        """Add a node with `inputs`, followed by constants; return the name of its output."""
        from onnx import helper, numpy_helper

        number = len(self.nodes)
        names = [f"{operator}.{number}.{k}" for k in range(len(constants))]
        self.constants += [
            numpy_helper.from_array(np.ascontiguousarray(array), name)
            for array, name in zip(constants, names, strict=True)
        ]
        out = f"{operator}.{number}"
        sources = [*(inputs or [self.last_output]), *names]
        self.nodes.append(helper.make_node(operator, sources, [out], **attributes))
        self.last_output = out
        return out

    def add_slice(self, source: str, columns: slice) -> str:
        """Add the columns of a tensor `[batch, columns]`."""
        bounds = (np.array([number], np.int64) for number in (columns.start, columns.stop, 1))
        return self.add_node("Slice", *bounds, inputs=[source])


def build_onnx_model(
    env: EnvSpec, spec: PolicySpec, arrays: PolicyArrays, metadata: Mapping[str, str]
) -> bytes:
    """Build an ONNX model with `metadata` about the policy; return its bytes."""
    from onnx import TensorProto, checker, helper

    graph = _Graph()
    if spec.normalise:
        graph.add_node("Sub", arrays["normaliser.mean"])
        graph.add_node("Mul", arrays["normaliser.scale"])
        clip = np.asarray(make_clip_bounds(spec), np.float32)
        if clip.ndim:
            graph.add_node("Max", -clip)
            graph.add_node("Min", clip)
        else:
            graph.add_node("Clip", -clip, clip)
    for layer in range(len(spec.hidden) + 1):
        graph.add_node("MatMul", arrays[f"actor.{layer}.weight"])
        graph.add_node("Add", arrays[f"actor.{layer}.bias"])
        if layer < len(spec.hidden):
            graph.add_node("Tanh" if spec.activation == "tanh" else "Relu")
    outputs = _add_actions(graph, env, spec)
    inputs = [(INPUT, spec.observation_size)] + [(MASK, spec.mask_size)] * (spec.mask_size > 0)
    graph_proto = helper.make_graph(
        graph.nodes,
        "policy",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
            for name, size in inputs
        ],
        outputs,
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


def _add_actions(graph: _Graph, env: EnvSpec, spec: PolicySpec) -> list[Any]:
    """Add the nodes that convert the network's output to actions; return the outputs."""
    if spec.action_kind == "continuous":
        _add_action_bounds(graph, spec)
    elif spec.action_kind == "discrete" and spec.mask_size:
        _add_mask(graph, graph.last_output, MASK)
    network = graph.last_output
    infos: list[Any] = []
    column = output = mask = 0
    for leaf in list_action_leaves(env):
        counts = list_counts(leaf)
        columns = slice(column, column + len(counts))
        graph.last_output = network
        if spec.action_kind == "discrete":
            graph.add_node("ArgMax", axis=1, keepdims=0)
        elif spec.action_kind == "composite":
            parts: list[str] = []
            for group in group_actions(counts):
                outputs = slice(output, output + group.outputs.stop - group.outputs.start)
                output = outputs.stop
                name = graph.add_slice(network, outputs)
                if group.count:
                    if spec.mask_size:
                        masks = slice(mask, mask + group.count * group.size)
                        mask = masks.stop
                        _add_mask(graph, name, graph.add_slice(MASK, masks))
                    graph.add_node("Reshape", np.array((-1, group.size, group.count), np.int64))
                    name = graph.add_node("ArgMax", axis=2, keepdims=0)
                parts.append(name)
            # The actions of a leaf are either all choices or all numbers.
            graph.add_node("Concat", inputs=parts, axis=1)
        elif len(counts) != env.action_size:
            graph.add_slice(network, columns)
        bounds = env.action_low[columns], env.action_high[columns]
        infos.append(_add_leaf(graph, leaf, *bounds))
        column = columns.stop
    return infos


def _add_mask(graph: _Graph, logits: str, mask: str) -> str:
    """Add the logits, with `MASKED_LOGIT` where the mask is 0."""
    condition = graph.add_node("Greater", np.array(0.0, np.float32), inputs=[mask])
    return graph.add_node("Where", np.array(MASKED_LOGIT), inputs=[condition, logits])


def _add_leaf(graph: _Graph, leaf: SpaceLeaf, low: Sequence[float], high: Sequence[float]) -> Any:
    """Convert the actions of a leaf to its type and shape; return the output of the model."""
    from onnx import helper

    dtype = np.dtype(leaf.dtype)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    if leaf.kind == "box":
        lows, highs = np.array(low, np.float32), np.array(high, np.float32)
        graph.add_node("Max", lows)
        graph.add_node("Min", highs)
        if dtype.kind != "f":
            graph.add_node("Round")
    elif any(leaf.starts):
        graph.add_node("Add", np.array(leaf.starts, np.int64).reshape(leaf.shape or -1).ravel())
    if dtype != (np.float32 if leaf.kind == "box" else np.int64):
        graph.add_node("Cast", to=kind)
    graph.add_node("Reshape", np.array((-1, *leaf.shape), np.int64))
    name = f"{OUTPUT}/{format_path(leaf.path)}" if leaf.path else OUTPUT
    graph.nodes[-1].output[0] = name
    return helper.make_tensor_value_info(name, kind, ["batch", *leaf.shape])


def _add_action_bounds(graph: _Graph, spec: PolicySpec) -> None:
    """Add the nodes that map the network's output to the range of squashed actions."""
    if not spec.squash:
        return
    low, high = (np.asarray(bound, np.float32) for bound in (spec.action_low, spec.action_high))
    # The network's outputs are the means, followed by the log standard deviations.
    graph.add_slice(graph.last_output, slice(0, spec.action_size))
    graph.add_node("Tanh")
    graph.add_node("Mul", (high - low) * np.float32(0.5))
    graph.add_node("Add", (low + high) * np.float32(0.5))


def measure_largest_difference(data: bytes, env: EnvSpec, policy: Policy, rows: Float32) -> float:
    """Return the largest difference between the model's actions and the policy's.

    Rows are observations, followed by any mask. For numbers above 1 in absolute value, the
    difference is relative. For choices, it is the gap between the best logit and the logit of the
    model's choice, so a tie counts as 0.
    """
    import onnxruntime

    spec, size = policy.spec, policy.spec.observation_size
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    inputs = {INPUT: rows[:, :size]} | ({MASK: rows[:, size:]} if spec.mask_size else {})
    leaves = list_action_leaves(env)
    model_columns = [
        values.reshape(len(rows), -1) - np.array(leaf.starts or 0)
        for leaf, values in zip(leaves, session.run(None, inputs), strict=True)
    ]
    is_whole = [np.dtype(leaf.dtype).kind != "f" for leaf in leaves for _ in list_counts(leaf)]
    model_actions = np.concatenate(model_columns, axis=1)
    counts = [count for leaf in leaves for count in list_counts(leaf)]
    batch = np.zeros((spec.width, spec.row_size), np.float32)
    largest = 0.0
    for first in range(0, len(rows), spec.width):
        chunk = rows[first : first + spec.width]
        batch[: len(chunk)], batch[len(chunk) :] = chunk, 0.0
        chunk_actions = model_actions[first : first + spec.width]
        out = policy.forward(batch).copy()
        actions = policy.to_environment(policy.distribution.mode(out)).reshape(len(out), -1)
        for group in group_actions(counts):
            columns = chunk_actions[:, group.columns]
            if group.count:
                logits = out[: len(chunk), group.outputs]
                logits = logits.reshape(len(chunk), group.size, group.count)
                choices = columns.astype(np.int64)[:, :, None]
                best = logits.max(axis=2)
                difference = best - np.take_along_axis(logits, choices, 2)[:, :, 0]
            else:
                numbers = actions[: len(chunk), group.columns]
                # Whole numbers were rounded.
                slack = np.where(is_whole[group.columns], 0.5, 0.0)
                gaps = np.maximum(np.abs(numbers - columns) - slack, 0.0)
                difference = gaps / np.maximum(1.0, np.abs(numbers))
            largest = max(largest, float(difference.max()))
    return largest
