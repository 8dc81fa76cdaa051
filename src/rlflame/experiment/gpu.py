"""Finds a GPU on which a recipe would run faster, without loading torch."""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from pathlib import Path

from rlflame.config.recipe import LearningSettings

HINT = "This recipe runs faster on this GPU: --device cuda"
#: From the measurements in docs/guides/learners.md: a GPU is at least twice as fast if a weight
#: matrix between hidden layers and the minibatches have at least these sizes.
_MIN_WEIGHTS, _MIN_SAMPLES = 256 * 256, 128


def find_device_hint(learning: LearningSettings, root: Path = Path("/")) -> str | None:
    """Return a hint if a GPU of this machine would be at least twice as fast as the CPU."""
    is_useful = is_faster_on_gpu(learning) and has_gpu(root) and has_cuda_torch()
    return HINT if is_useful else None


def is_faster_on_gpu(learning: LearningSettings) -> bool:
    """Return whether a recipe for the CPU would be at least twice as fast on a GPU."""
    # Whole episodes have different lengths, so their updates are not captured as a CUDA graph.
    is_captured = learning.rollout.unit == "steps"
    weights = max(
        (inputs * units for inputs, units in pairwise(learning.network.hidden)), default=0
    )
    is_large = weights >= _MIN_WEIGHTS and learning.samples_per_gradient >= _MIN_SAMPLES
    return learning.device == "cpu" and is_captured and is_large


def has_gpu(root: Path = Path("/")) -> bool:
    """Return whether this process can use an NVIDIA GPU.

    Initialising the driver can take seconds, so this function only looks for the driver's files.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if not visible or visible.startswith("-"):
        return False
    try:
        has_driver = any((root / "proc/driver/nvidia/gpus").iterdir())
        # In a container, only the files of the container's GPUs exist in `/dev`.
        return has_driver and any(
            os.access(file, os.R_OK | os.W_OK) for file in (root / "dev").glob("nvidia[0-9]*")
        )
    except OSError:
        return False


def has_cuda_torch() -> bool:
    """Return whether the installed torch supports CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").is_file()
