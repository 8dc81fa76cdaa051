"""The wire format: values survive a round trip, and damaged messages do no harm."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from typing import Any, TypeVar

import numpy as np
import pytest
import rollouts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from typing_extensions import TypeAliasType

from rlflame.rollout import task as messages
from rlflame.rollout import wire
from rlflame.rollout.wire import WireError

quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)

# Strategies for all types in `rollout.task`.

words = st.text(max_size=12)
whole = st.integers(-(2**63), 2**63)
real = st.floats(allow_nan=False, allow_infinity=False)
bounds = st.lists(st.floats(allow_nan=False), max_size=4).map(tuple)
plain = st.recursive(
    st.none() | st.booleans() | whole | st.floats(allow_nan=False) | words,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(words.filter(lambda key: not key.startswith("$")), inner, max_size=3)
    ),
    max_leaves=6,
)
kwargs = st.dictionaries(words.filter(lambda key: not key.startswith("$")), plain, max_size=3)
kinds = st.sampled_from(["discrete", "continuous", "composite"])


def array(dtype: Any, dims: int | None = None) -> st.SearchStrategy:
    shapes = hnp.array_shapes(
        min_dims=0 if dims is None else dims,
        max_dims=3 if dims is None else dims,
        min_side=0,
        max_side=4,
    )
    finite = {"allow_nan": False, "allow_infinity": False} if np.dtype(dtype).kind == "f" else {}
    return hnp.arrays(dtype, shapes, elements=finite or None)


counts = st.lists(whole, max_size=3).map(tuple)
leaves = st.builds(
    messages.SpaceLeaf,
    st.lists(words | whole, max_size=3).map(tuple),
    st.sampled_from(["box", "discrete", "multi_discrete", "multi_binary"]),
    words,
    counts,
    counts,
    counts,
)
wrappers = st.builds(messages.WrapperSpec, words, kwargs)
env_specs = st.builds(
    messages.EnvSpec,
    words,
    kwargs,
    st.none() | whole,
    whole,
    kinds,
    whole,
    whole,
    bounds,
    bounds,
    observation_leaves=st.lists(leaves, max_size=2).map(tuple),
    action_leaves=st.lists(leaves, max_size=2).map(tuple),
    action_counts=counts,
    mask_source=st.sampled_from(["none", "info", "observation", "method"]),
    ignore=st.lists(words, max_size=2).map(tuple),
    wrappers=st.lists(wrappers, max_size=2).map(tuple),
)
policy_specs = st.builds(
    messages.PolicySpec,
    kinds,
    whole,
    whole,
    bounds,
    bounds,
    st.lists(whole, max_size=3).map(tuple),
    st.sampled_from(["tanh", "relu"]),
    st.booleans(),
    real,
    whole,
    st.booleans(),
    action_counts=counts,
    mask_size=whole,
    choice_spans=st.lists(st.tuples(whole, whole), max_size=2).map(tuple),
)
env_states = st.builds(
    messages.EnvState,
    st.sampled_from(["fresh", "replay", "mujoco"]),
    whole,
    whole,
    whole,
    real,
    array(np.float32) | array(np.int64),
    array(np.float64),
    array(np.float32),
    words,
)
tasks = st.builds(
    messages.RolloutTask,
    words,
    whole,
    st.sampled_from(["train", "evaluate"]),
    whole,
    whole,
    env_specs,
    policy_specs,
    words,
    st.sampled_from(["steps", "episodes"]),
    whole,
    whole,
    whole,
    st.sampled_from(["best", "sample", "uniform"]),
    st.booleans(),
    st.lists(env_states, max_size=2).map(tuple),
)
episodes = st.builds(messages.EpisodeStat, whole, whole, whole, real, whole, st.booleans(), whole)
fragments = st.builds(
    messages.Fragment,
    whole,
    whole,
    array(np.float32),
    array(np.float32) | array(np.int64),
    array(np.float32),
    array(np.float64),
    array(np.bool_),
    array(np.bool_),
    array(np.int64),
    array(np.float32),
    array(np.int64),
    array(np.float32),
    st.lists(episodes, max_size=2).map(tuple),
    st.lists(env_states, max_size=2).map(tuple),
)
failures = st.builds(
    messages.RolloutFailure, whole, whole, whole, whole, whole, words, words, words
)
policies = st.dictionaries(words.filter(lambda key: not key.startswith("$")), array(np.float32))
VALUES = {
    "SpaceLeaf": leaves,
    "WrapperSpec": wrappers,
    "EnvSpec": env_specs,
    "PolicySpec": policy_specs,
    "EnvState": env_states,
    "RolloutTask": tasks,
    "EpisodeStat": episodes,
    "Fragment": fragments,
    "RolloutFailure": failures,
    "weights": policies,
    "plain": plain,
}


def same(a: Any, b: Any) -> bool:
    """Whether two values have equal types, shapes and bits at all levels."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b and str(a) == str(b)  # str distinguishes -0.0 and 0.0


@pytest.fixture(scope="module")
def fragment_bytes() -> bytes:
    """A small fragment of a real worker, with an episode end and states."""
    env = rollouts.fake(length=3, continuous=True)
    return wire.encode(rollouts.run(rollouts.task(env, steps=4, rows=1)))


def read_header(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data, 10)
    return json.loads(data[18 : 18 + length])


def sealed(data: bytes) -> bytes:
    """Set a valid checksum, as a malicious sender could."""
    return data[:6] + struct.pack("<I", zlib.crc32(data[10:])) + data[10:]


def with_header(data: bytes, header: Any) -> bytes:
    """Replace the header of a message, with a valid checksum and valid sizes."""
    (length,) = struct.unpack_from("<Q", data, 10)
    old_start = -(-(18 + length) // 64) * 64
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = -(-(18 + len(text)) // 64) * 64
    head = data[:10] + struct.pack("<Q", len(text)) + text
    return sealed(head + bytes(start - len(head)) + data[old_start:])


def refused(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        wire.decode(data)
    return str(caught.value)


@pytest.mark.parametrize("name", VALUES)
def test_what_goes_in_comes_out(name: str) -> None:
    @quick
    @given(VALUES[name])
    def check(value: Any) -> None:
        data = wire.encode(value)
        back = wire.decode(data)
        assert same(value, back)
        assert wire.encode(back) == data

    check()


def test_every_type_of_the_boundary_is_tried() -> None:
    crossing = {
        name
        for name, kind in vars(messages).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    assert crossing <= set(VALUES)


def test_arrays_come_back_read_only_and_without_a_copy() -> None:
    data = wire.encode({"w": np.arange(6, dtype=np.float32)})
    back = wire.decode(data)["w"]
    assert not back.flags.writeable
    assert np.shares_memory(back, np.frombuffer(data, np.uint8))


def test_arrays_that_are_not_contiguous_or_of_the_other_byte_order_travel_as_their_values() -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    back = wire.decode(wire.encode({"a": table.T, "b": table.astype(">f4"), "c": table[:, ::2]}))
    assert back["a"].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert back["b"].tolist() == table.tolist()
    assert back["b"].dtype == np.dtype("<f4")
    assert back["c"].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_a_message_that_is_cut_anywhere_is_refused(fragment_bytes: bytes) -> None:
    for end in range(len(fragment_bytes)):
        with pytest.raises(WireError):
            wire.decode(fragment_bytes[:end])


def test_a_message_with_something_behind_it_is_refused(fragment_bytes: bytes) -> None:
    for extra in (b"\x00", bytes(64), fragment_bytes):
        refused(fragment_bytes + extra)
        refused(sealed(fragment_bytes + extra))


def test_any_single_flipped_bit_is_noticed(fragment_bytes: bytes) -> None:
    damaged = bytearray(fragment_bytes)
    for bit in range(8 * len(damaged)):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.decode(damaged)
        damaged[bit // 8] ^= 1 << bit % 8


def test_damage_with_a_checksum_that_fits_is_refused_or_harmless(fragment_bytes: bytes) -> None:
    """The worst that a malicious sender can achieve is a fragment with other numbers."""
    generator = np.random.default_rng(0)
    outcomes = {"refused": 0, "read": 0}
    for _ in range(4000):
        damaged = bytearray(fragment_bytes)
        for place in generator.integers(10, len(damaged), generator.integers(1, 4)):
            damaged[place] = generator.integers(256)
        try:
            wire.decode(sealed(bytes(damaged)))
            outcomes["read"] += 1
        except WireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


@quick
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    refused(noise)
    refused(sealed(wire.MAGIC + bytes(4) + noise))


@quick
@given(st.recursive(plain, lambda inner: st.dictionaries(words, inner, max_size=3), max_leaves=8))
def test_any_json_in_place_of_the_header_is_refused(header: Any) -> None:
    refused(with_header(wire.encode(None), header))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"value":' * 50_000,
        b"1" * 10_000,
        b'{"value":NaN,"arrays":[],"size":0}',
        b'{"value":1,"arrays":[],"size":' + b"9" * 400 + b"}",
        b'{"value":1,"arrays":5,"size":0}',
        b'{"value":{"$type":[],"fields":{}},"arrays":[],"size":0}',
        b'{"value":{"$type":"EnvSpec","fields":[]},"arrays":[],"size":0}',
        b'{"value":{"$type":"EnvSpec"},"arrays":[],"size":0}',
        b'{"value":{"$type":"dict","fields":{}},"arrays":[],"size":0}',
    ],
    ids=range(13),
)
def test_headers_that_no_encoder_writes(text: bytes) -> None:
    refused(with_header(wire.encode(None), text))


@pytest.mark.parametrize("index", [-1, 1, 2**70, "0", None, 0.5, [], {}])
def test_a_reference_to_an_array_that_is_not_there(index: Any) -> None:
    data = wire.encode({"w": np.zeros(3, np.float32)})
    header = read_header(data)
    header["value"]["w"]["$array"] = index
    refused(with_header(data, header))


@pytest.mark.parametrize(
    "entry",
    [
        ["|O", [3], 0],
        ["<c8", [1], 0],
        ["<U1", [3], 0],
        [">f4", [3], 0],
        ["f4", [3], 0],
        [None, [3], 0],
        [[], [3], 0],
        ["<f4", [4], 0],
        ["<f4", [-3], 0],
        ["<f4", [-3, -1], 0],
        ["<f4", [2**62, 2**62], 0],
        ["<f4", [0, 2**70], 0],
        ["<f4", [1] * 100, 0],
        ["<f4", [3.0], 0],
        ["<f4", ["3"], 0],
        ["<f4", "3", 0],
        ["<f4", 3, 0],
        ["<f4", None, 0],
        ["<f4", [3], 1],
        ["<f4", [3], -4],
        ["<f4", [3], 2**70],
        ["<f4", [3], 0.5],
        ["<f4", [3], "0"],
        ["<f4", [3]],
        ["<f4", [3], 0, 0],
        [],
        None,
        {},
    ],
    ids=str,
)
def test_arrays_that_cannot_be(entry: Any) -> None:
    data = wire.encode({"w": np.zeros(3, np.float32)})
    header = read_header(data)
    header["arrays"] = [entry]
    refused(with_header(data, header))


def whole_message() -> tuple[bytes, dict[str, Any]]:
    """A task and a fragment, which together contain all types of the wire format."""
    env = rollouts.fake(length=3, continuous=True)
    task = rollouts.task(env, steps=4, rows=1)
    fragment = rollouts.run(task)
    failure = messages.RolloutFailure(0, 1, 2, 3, 4, "m", "t", "o")
    value = {"task": rollouts.following(task, fragment), "fragment": fragment, "failure": failure}
    data = wire.encode(value)
    return data, read_header(data)


@dataclasses.dataclass
class Place:
    """A field of a dataclass in a header, or a column of a table of dataclasses."""

    kind: str
    name: str
    holder: dict[str, Any]
    column: bool

    def put(self, value: Any) -> None:
        self.holder[self.name] = [value] if self.column else value


def typed_places(value: Any) -> list[Place]:
    """All fields of all dataclasses in a header."""
    if isinstance(value, list):
        return [place for item in value for place in typed_places(item)]
    if not isinstance(value, dict):
        return []
    kind = value.get("$type") or value.get("$table")
    inner = value.get("fields") or value.get("columns") or value
    own = [Place(kind, name, inner, "columns" in value) for name in inner] if kind else []
    return own + [place for item in inner.values() for place in typed_places(item)]


def belongs(field: str, wrong: Any) -> bool:
    """Whether a value is valid for a field with this annotation, by separate rules."""
    if field in ("Mapping[str, Any]",):
        return wrong == {}
    if field == "int | None":
        return wrong is None or wrong == 7
    if field == "tuple[int, ...] | None":
        return wrong is None or wrong == []
    return {
        "int": wrong == 7,
        "float": wrong in (7, 0.5) and wrong is not True,
        "str": isinstance(wrong, str),
        "bool": wrong is True,
    }.get(field, False) or (
        field.startswith("tuple") and (wrong == [] or (wrong == ["no"] and "str" in field))
    )


def test_a_field_of_a_wrong_type_is_refused_in_every_place() -> None:
    data, _ = whole_message()
    wrongs: list[Any] = [None, True, 7, 0.5, "no", [], ["no"], {}, {"no": 1}, {"$array": 0}]
    wrongs += [[None], {"$type": "RolloutFailure", "fields": {}}]
    count = len(typed_places(read_header(data)["value"]))
    assert count > 80
    tried = 0
    for number in range(count):
        for wrong in wrongs:
            header = read_header(data)
            place = typed_places(header["value"])[number]
            annotation = getattr(messages, place.kind).__annotations__[place.name]
            is_array = annotation in ("Array", "Float32", "Float64") or "NDArray" in annotation
            if belongs(annotation, wrong) or (is_array and wrong == {"$array": 0}):
                continue
            place.put(wrong)
            if annotation == "Mapping[str, Any]" and isinstance(wrong, dict):
                continue
            with pytest.raises(WireError):
                wire.decode(with_header(data, header))
            tried += 1
    assert tried > 800


def test_a_field_too_few_or_too_many_is_refused_in_every_place() -> None:
    data, _ = whole_message()
    for number in range(len(typed_places(read_header(data)["value"]))):
        header = read_header(data)
        place = typed_places(header["value"])[number]
        value = place.holder.pop(place.name)
        refused(with_header(data, header))
        place.holder[place.name] = value
        place.holder["surprise"] = value
        refused(with_header(data, header))


def tables(value: Any) -> list[dict[str, Any]]:
    """All tables in a header."""
    own = [value] if isinstance(value, dict) and "$table" in value else []
    inner = list(value.values()) if isinstance(value, dict) else value
    return own + [t for item in inner for t in tables(item)] if isinstance(inner, list) else own


def test_a_table_with_a_shorter_column_or_of_an_unknown_type_is_refused() -> None:
    data, whole = whole_message()
    assert len(tables(whole["value"])) == 3
    for number in range(3):
        columns = tables(whole["value"])[number]["columns"]
        for name in columns:
            for wrong in ([], 2 * columns[name] if isinstance(columns[name], list) else [], 7):
                header = read_header(data)
                tables(header["value"])[number]["columns"][name] = wrong
                refused(with_header(data, header))
        for name in ("Nobody", None, [], {}):
            header = read_header(data)
            tables(header["value"])[number]["$table"] = name
            refused(with_header(data, header))


def test_states_of_different_kinds_travel_together() -> None:
    made = [
        messages.EnvState("fresh", 0, 1, 0, 0.0, np.zeros(0, np.float32), np.zeros(0), shown, "a")
        for shown in (np.zeros(0, np.float32), np.ones(3, np.float32))
    ]
    shown = np.ones(3, np.float32)
    made.append(messages.EnvState("replay", 2, 3, 2, 1.5, np.arange(2), np.zeros(0), shown, "b"))
    task = rollouts.task(rollouts.fake(), states=tuple(made))
    assert same(wire.decode(wire.encode(task)), task)


@pytest.mark.parametrize("dtype", ["<f8", "<i8", "<i4", "|b1", "|u1"])
def test_an_array_of_another_dtype_is_refused_where_the_field_names_one(dtype: str) -> None:
    state = messages.EnvState(
        *("fresh", 0, 0, 0, 0.0, np.zeros(2, np.int64), np.zeros(0)),
        *(np.zeros(8, np.float32), ""),
    )
    data = wire.encode(state)
    header = read_header(data)
    count = 32 // np.dtype(dtype).itemsize
    header["arrays"][2][:2] = [dtype, [count]]
    assert "observation" in refused(with_header(data, header))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_that_are_not_finite_neither_leave_nor_arrive(bad: float, dtype: Any) -> None:
    values = np.zeros(16, dtype)
    data = bytearray(wire.encode({"w": values}))
    values[5] = bad
    with pytest.raises(WireError):
        wire.encode({"w": values})
    data[-values.nbytes :] = values.tobytes()
    refused(sealed(bytes(data)))


def test_numbers_that_are_not_finite_neither_leave_nor_arrive() -> None:
    with pytest.raises(WireError):
        wire.encode({"x": float("nan")})
    with pytest.raises(WireError):
        wire.encode(np.float64("nan"))
    episode = messages.EpisodeStat(0, 0, 0, 1.5, 3, False, 2)
    data = wire.encode(episode)
    for bad in (float("nan"), float("inf"), -float("inf")):
        header = read_header(data)
        header["value"]["fields"]["episode_return"] = bad
        refused(with_header(data, header))


def test_a_space_may_be_unbounded() -> None:
    env = rollouts.policy_spec(rollouts.fake(continuous=True), action_low=(-np.inf, 0.0))
    assert wire.decode(wire.encode(env)).action_low == (-np.inf, 0.0)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: 2},
        {"$type": "EnvSpec"},
        {"$array": 0},
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, np.complex64),
        {1, 2},
        b"bytes",
        ValueError("no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_place_on_the_wire_is_refused_at_the_door(value: Any) -> None:
    with pytest.raises(WireError):
        wire.encode({"value": value})


def test_nothing_is_ever_unpickled() -> None:
    import pickle

    refused(pickle.dumps({"value": 1}))
    source = wire.__spec__.loader.get_source(wire.__name__)
    assert "import pickle" not in source
    assert "allow_pickle" not in source


def test_an_array_is_known_where_numpy_gives_its_alias_a_name(monkeypatch):
    """numpy 2.5 gives the alias a name if Python supports it."""
    scalar = TypeVar("scalar", bound=np.generic)
    named = TypeAliasType(
        "NDArray", np.ndarray[tuple[Any, ...], np.dtype[scalar]], type_params=(scalar,)
    )
    monkeypatch.setattr(wire, "NDArray", named)
    kind = dataclasses.make_dataclass(
        "Kind", [("numbers", named[np.float32]), ("more", named[Any] | None)]
    )
    numbers, more = (fits for fits, _ in wire.make_field_checks(kind).values())
    assert numbers(np.zeros(2, np.float32))
    assert not numbers(np.zeros(2))
    assert not numbers(None)
    assert more(None)
    assert more(np.zeros(2))
    assert not more("words")
