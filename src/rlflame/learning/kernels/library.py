"""Loads the compiled kernels, and the functions of numpy that they call.

The kernels are optional: without a C compiler, rlflame is installed without them, and numpy
computes the same results. The environment variable RLFLAME_KERNELS=off disables them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int64, c_void_p

import numpy as np

from rlflame.rollout.task import Array, Float32

#: Set to "off", "0", "no" or "false" to disable the kernels.
VARIABLE = "RLFLAME_KERNELS"
_OFF = "off", "0", "no", "false"
MAX_LAYERS = 16
#: The version of all functions; networks.c has it too. Increase it in both files with every change.
_VERSION = 8
#: The functions in sac.c and networks.c that lanes.c can run in two threads.
_LANE_FUNCTIONS = (
    *("step_adam", "sac_act", "sac_evaluate_critic", "sac_backward_critic"),
    *("sac_evaluate_actions", "sac_compute_action_slopes"),
)
#: The address of the elements is the first field of numpy's public structure PyArrayObject.
_DATA_OFFSET = object.__basicsize__
_read_pointer = c_void_p.from_address


class _Ufunc(ctypes.Structure):
    _fields_ = (("loop", c_void_p), ("data", c_void_p))


class _Functions(ctypes.Structure):
    _fields_ = (
        ("multiply", c_void_p),
        ("multiply_vector", c_void_p),
        ("dot", c_void_p),
        ("tanh", _Ufunc),
        ("exp", _Ufunc),
        ("log", _Ufunc),
        ("log1p", _Ufunc),
        ("add", _Ufunc),
        ("maximum", _Ufunc),
    )


class NetworkBuffers(ctypes.Structure):
    """The sizes and addresses of a multilayer perceptron and its buffers."""

    _fields_ = (
        ("layers", c_int64),
        ("rows", c_int64),
        ("tanh", c_int64),
        ("sizes", c_int64 * (MAX_LAYERS + 1)),
        ("weights", c_void_p * MAX_LAYERS),
        ("gradients", c_void_p * MAX_LAYERS),
        ("inputs", c_void_p * MAX_LAYERS),
        ("deltas", c_void_p * MAX_LAYERS),
        ("out", c_void_p),
        ("zeros", c_void_p),
    )


class DistributionBuffers(ctypes.Structure):
    """The addresses of the parameters and buffers of Gaussians or of a choice."""

    _fields_ = (
        *((name, c_int64) for name in ("is_choice", "actions")),
        *((name, c_void_p) for name in ("log_std", "log_std_gradient", "z", "squares", "inverse")),
        *((name, c_void_p) for name in ("softmax", "log_softmax", "upstream", "terms")),
        *((name, c_void_p) for name in ("log_probs", "log_ratio", "ratio", "slope", "objective")),
    )


class MinibatchFields(ctypes.Structure):
    """The addresses of the samples of a minibatch, and the coefficients of PPO's loss."""

    _fields_ = (
        *((name, c_void_p) for name in ("observations", "actions", "log_probs", "advantages")),
        *((name, c_void_p) for name in ("returns", "old_values")),
        *((name, c_float) for name in ("lowest_ratio", "highest_ratio", "policy_scale")),
        *((name, c_float) for name in ("entropy_slope", "value_scale", "value_limit")),
        ("clips_values", c_int64),
    )


class Mailbox(ctypes.Structure):
    """The memory in which one of two learners writes numbers for the other."""

    _fields_ = (
        ("exchange", c_int64),
        ("padding", c_char * 56),
        ("numbers", c_double * 8 * 2),
    )


class EpochFields(ctypes.Structure):
    """The state of PPO's loop over minibatches, which `run_epoch` advances."""

    _fields_ = (
        ("samples", MinibatchFields),
        ("log_volume_constant", c_double),
        ("networks", c_void_p * 2),
        *((name, c_void_p) for name in ("head", "losses")),
        *((name, c_void_p) for name in ("parameters", "gradient", "total", "first", "second")),
        ("shards", c_int64),
        *((name, c_int64 * 2) for name in ("starts", "ends", "owns")),
        *((name, c_void_p) for name in ("rates", "epsilons")),
        *((name, c_int64) for name in ("steps", "position", "count")),
        *((name, c_int64) for name in ("has_max_norm", "has_kl_limit")),
        *((name, c_double) for name in ("max_norm", "kl_limit")),
        *((name, c_double * 5 * 2) for name in ("numbers", "totals")),
        ("norm", c_double),
        *((name, c_void_p) for name in ("outbox", "inbox")),
        *((name, c_int64) for name in ("exchange", "waits")),
    )


class AdamFields(ctypes.Structure):
    """A step of Adam for a part of the parameters, with optional targets that follow them."""

    _fields_ = (
        *((name, c_void_p) for name in ("parameters", "gradient", "first", "second", "targets")),
        *((name, c_int64) for name in ("count", "drops_still")),
        *((name, c_float) for name in ("to_first", "to_second", "rate", "epsilon", "target_rate")),
    )


class SacLane(ctypes.Structure):
    """The networks of one lane of an update of SAC, and the addresses of samples and slopes."""

    _fields_ = (
        *((name, c_void_p) for name in ("actor", "critic", "target")),
        *((name, c_void_p) for name in ("actor_observations", "observations", "actions")),
        *((name, c_void_p) for name in ("next_observations", "policy_actions")),
        ("next_policy_actions", c_void_p),
        ("samples", c_int64),
        *((name, c_void_p) for name in ("noise", "lane_actions", "scaled_noise", "log_std")),
        *((name, c_void_p) for name in ("slope", "log_probs", "upstream", "action_slopes")),
        *((name, c_float) for name in ("lowest", "highest", "log_volume")),
    )


class _PyUfunc(ctypes.Structure):
    """The start of numpy's public structure PyUFuncObject."""

    _fields_ = (
        ("reference_count", ctypes.c_ssize_t),
        ("type", c_void_p),
        ("inputs", c_int),
        ("outputs", c_int),
        ("arguments", c_int),
        ("identity", c_int),
        ("loops", POINTER(c_void_p)),
        ("data", POINTER(c_void_p)),
        ("loop_count", c_int),
        ("reserved", c_int),
        ("name", c_char_p),
        ("types", POINTER(c_char)),
    )


class Kernels:
    """The compiled functions. Pass them addresses of contiguous float32 arrays."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        structures = (
            *(_Functions, NetworkBuffers, DistributionBuffers, MinibatchFields),
            *(Mailbox, EpochFields, AdamFields, SacLane),
        )
        layout = [_VERSION, *map(ctypes.sizeof, structures)]
        if list((c_int64 * len(layout)).in_dll(library, "rlflame_layout")) != layout:
            raise LookupError(f"{path} was compiled from other source files")
        array = np.zeros(3)[1:]
        if get_address(array) != array.ctypes.data:
            raise LookupError("numpy's arrays have another structure")
        blas = ctypes.CDLL(np.linalg._umath_linalg.__file__)
        self._functions = _Functions(
            _find_address(blas, "scipy_cblas_sgemm64_"),
            _find_address(blas, "scipy_cblas_sgemv64_"),
            _find_address(blas, "scipy_cblas_sdot64_"),
            *map(_find_loop, (np.tanh, np.exp, np.log, np.log1p, np.add, np.maximum)),
        )
        pointer = c_void_p
        for function, types, result in (
            (library.rlflame_forward, (pointer, pointer), None),
            (library.rlflame_backward, (pointer, pointer), None),
            (library.rlflame_backward_layer, (pointer, c_int64, pointer), None),
            (library.rlflame_backward_with_helper, (pointer, pointer, pointer), None),
            (library.rlflame_policy_gradient, (pointer, pointer, pointer, c_double, pointer), None),
            (library.rlflame_value_gradient, (pointer, pointer, pointer), c_double),
            (library.rlflame_run_epoch, (pointer,), c_int64),
            (library.rlflame_step_adam, (pointer,), None),
            (library.rlflame_run_lanes, (pointer, pointer, pointer, pointer), None),
        ):
            function.argtypes, function.restype = [pointer, *types], result
        # All of these functions take numpy's functions as their first argument.
        functions = ctypes.addressof(self._functions)
        self.forward = functools.partial(library.rlflame_forward, functions)
        self.backward = functools.partial(library.rlflame_backward, functions)
        self.backward_layer = functools.partial(library.rlflame_backward_layer, functions)
        self.backward_with_helper = functools.partial(
            library.rlflame_backward_with_helper, functions
        )
        self.compute_policy_gradient = functools.partial(library.rlflame_policy_gradient, functions)
        self.compute_value_gradient = functools.partial(library.rlflame_value_gradient, functions)
        self.run_epoch = functools.partial(library.rlflame_run_epoch, functions)
        self.step_adam = functools.partial(library.rlflame_step_adam, functions)
        self._run_lanes = functools.partial(library.rlflame_run_lanes, functions)
        #: The functions that `run_lanes` can run.
        self._lane_functions = {
            name: _find_address(library, f"rlflame_{name}") for name in _LANE_FUNCTIONS
        }
        self.start_helper, self.stop_helper = (
            getattr(library, f"rlflame_{word}_helper") for word in ("start", "stop")
        )
        self.start_helper.argtypes, self.start_helper.restype = [], pointer
        self.stop_helper.argtypes, self.stop_helper.restype = [pointer], None

    def run_lanes(self, helper: int | None, name: str, lanes: Sequence[int]) -> None:
        """Run the function `name` for both lanes, the second one in the thread of the helper."""
        self._run_lanes(helper, self._lane_functions[name], *lanes)


@functools.cache
def load_kernels() -> Kernels | None:
    """Return the kernels, or None if they are disabled or cannot be used."""
    path = _find_library()
    if path is None or is_disabled():
        return None
    try:
        return Kernels(path)
    except (OSError, AttributeError, LookupError, ValueError):
        return None


def is_disabled() -> bool:
    """Return whether the user has switched the kernels off."""
    return os.environ.get(VARIABLE, "").lower() in _OFF


def is_missing() -> bool:
    """Return whether rlflame was installed without the kernels."""
    return _find_library() is None


def _find_library() -> str | None:
    stem = os.path.join(os.path.dirname(__file__), "_kernels")
    paths = (stem + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if os.path.exists(path)), None)


def get_address(array: Array) -> int:
    """Return the address of an array's first element."""
    # This is five times as fast as array.ctypes.data; `load_kernels` checks that it works.
    address: int = _read_pointer(id(array) + _DATA_OFFSET).value  # type: ignore[assignment]
    return address


def get_array_address(array: Array, dtype: type = np.float32) -> int:
    """Return the address of an array that the kernels can read, or raise TypeError."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"{array.dtype} {array.strides} is not a contiguous {dtype.__name__} array")
    return get_address(array)


def make_check_numbers(key: float, *shape: int) -> Float32:
    """Return varied numbers between -2 and 2, to compare results of the kernels and of numpy."""
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    result: Float32 = (2.0 * np.cos(key + 1.7 * numbers**1.3)).astype(np.float32)
    return result


def _find_address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), c_void_p).value


def _find_loop(function: np.ufunc) -> _Ufunc:
    """Return numpy's loop of this function for float32."""
    table = _PyUfunc.from_address(id(function))
    if table.name != function.__name__.encode() or table.arguments != function.nargs:
        raise LookupError(f"numpy's {function.__name__} has another structure")
    codes = [np.dtype(np.float32).num] * function.nargs
    for number in range(table.loop_count):
        start = number * function.nargs
        if [ord(table.types[start + i]) for i in range(function.nargs)] == codes:
            return _Ufunc(table.loops[number], table.data[number])
    raise LookupError(f"numpy's {function.__name__} has no loop for float32")
