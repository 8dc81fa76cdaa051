"""Checkpoints survive a round trip, and other files are refused with a sentence.

The tests build damaged and forged files from the published layout of safetensors: eight bytes of
header length, the header, and the tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from importlib import metadata
from pathlib import Path

import failpoints
import numpy as np
import pytest

from rlflame.config.recipe import LearningSettings
from rlflame.errors import CheckpointError, RlflameError
from rlflame.experiment import components
from rlflame.fleet.inline import InlineFleet
from rlflame.learning.factory import compute_environment_fingerprint
from rlflame.rollout import machine, wire
from rlflame.rollout.machine import read_versions
from rlflame.storage import checkpoint, safetensors_file
from rlflame.training.evaluation import EvaluationRecord, make_evaluation_plan


class Nobody:
    """A recorder and a stop request that do nothing."""

    is_requested = False

    def record_iteration(self, progress, metrics, fragments): ...
    def record_evaluation(self, progress, record, policy): ...
    def record_snapshot(self, take, progress, final): ...

    def time_phase(self, name):
        return contextlib.nullcontext()

    allow_interrupt = contextlib.nullcontext


def made(env, **learning):
    """A checkpoint after a short run, with all fields set."""
    config = failpoints.config(
        env, learning=learning, stop_at_steps=64, evaluation={"every_steps": None}
    )
    with InlineFleet() as fleet:
        begun = components.make_initial_checkpoint(
            config.recipe, components.make_env_spec(config.learning.environment)
        )
        trainer = components.make_trainer(begun, fleet, Nobody(), Nobody(), "run")
        trainer.run()
        record = trainer.evaluate(
            make_evaluation_plan(config.recipe.evaluation, final=True),
            trainer.take_snapshot().policy,
        )
    snapshot = trainer.take_snapshot()
    return dataclasses.replace(
        begun,
        policy=snapshot.policy,
        progress=snapshot.progress,
        snapshot=snapshot,
        line_counts=(3, 17),
        best=dataclasses.replace(record, mean=record.mean + 0.1),
        evaluation=record,
    )


@pytest.fixture(scope="module")
def cartpole():
    return made("CartPole-v1", rollout={"staleness": 1})


@pytest.fixture(scope="module")
def hopper():
    return made("Hopper-v5", rollout={"num_slots": 1, "envs_per_slot": 1, "steps": 32})


@pytest.fixture
def file(cartpole, tmp_path):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, cartpole)
    return path


@pytest.fixture(autouse=True)
def _no_unpickling(monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)


def refused(path):
    """The message with which a file is refused."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    message = caught.value.message
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 600
    return message


# The layout, by hand.


def taken_apart(data):
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(header, body, repeated=""):
    """A file with a valid checksum; `repeated` is raw JSON at the header's start."""
    header = json.loads(json.dumps(header))
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["checksum"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    text = b"{" + repeated.encode() + text[1:]
    data = struct.pack("<Q", len(text)) + text + body
    found = data.find(b'"checksum":"')
    if found < 0:
        return data
    start = found + len(b'"checksum":"')
    return data[:start] + hashlib.sha256(data).hexdigest().encode() + data[start + 64 :]


DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}
NAMES = {np.dtype(code): name for name, code in DTYPES.items()}


def tensors_of(data):
    header, body = taken_apart(data)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = np.frombuffer(body[begin:end], DTYPES[entry["dtype"]])
            found[name] = array.reshape(entry["shape"]).copy()
    return found, header["__metadata__"]


def forged(path, tensors, metadata):
    """Write a file with these tensors and texts, and valid digests and checksum."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        state.update(f"{name}|{array.dtype.str}|{array.shape}|".encode() + array.tobytes())
    progress = json.loads(metadata["progress"])
    state.update(json.dumps(progress, sort_keys=True).encode())
    metadata = {**metadata, "state_digest": state.hexdigest()}
    with contextlib.suppress(ValueError):
        recipe = json.dumps(json.loads(metadata["recipe"]), sort_keys=True)
        whole = hashlib.sha256(f"{state.hexdigest()}|{recipe}".encode())
        metadata["digest"] = whole.hexdigest()
    header, body = {"__metadata__": metadata}, b""
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        offsets = [len(body), len(body) + array.nbytes]
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        body += array.tobytes()
    path.write_bytes(put_together(header, body))


@pytest.fixture
def forge(file):
    """Change tensors and texts of a valid file, with valid digests."""

    def change(tensors=None, metadata=None):
        old_tensors, old_metadata = tensors_of(file.read_bytes())
        new = {n: a for n, a in {**old_tensors, **(tensors or {})}.items() if a is not None}
        texts = {n: t for n, t in {**old_metadata, **(metadata or {})}.items() if t is not None}
        forged(file, new, texts)
        return file

    return change


# Round trip.


def assert_same(a, b):
    """Check that two dataclasses with arrays are equal at all levels."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("which", ["cartpole", "hopper"])
def test_every_field_comes_back(which, request, tmp_path):
    whole = request.getfixturevalue(which)
    written = checkpoint.save(tmp_path / "a.safetensors", whole)
    loaded = checkpoint.load(tmp_path / "a.safetensors")
    assert loaded.resumable
    assert_same(loaded, written)
    assert_same(dataclasses.replace(loaded, state_digest="", digest=""), whole)


def test_a_policy_file_holds_the_policy_and_its_record_alone(cartpole, tmp_path):
    record = cartpole.evaluation
    checkpoint.save(tmp_path / "p.safetensors", checkpoint.make_policy_checkpoint(cartpole, record))
    loaded = checkpoint.load(tmp_path / "p.safetensors")
    assert not loaded.resumable
    assert loaded.best == loaded.evaluation == record
    assert_same(loaded.policy, cartpole.policy)
    tensors, _ = tensors_of((tmp_path / "p.safetensors").read_bytes())
    assert {name.split(".")[0] for name in tensors} == {"policy"}


def test_infinite_action_bounds_come_back(hopper, tmp_path):
    bounds = {"action_low": (-np.inf,) * 3, "action_high": (np.inf,) * 3}
    endless = dataclasses.replace(
        hopper,
        env=dataclasses.replace(hopper.env, **bounds),
        policy_spec=dataclasses.replace(hopper.policy_spec, **bounds),
    )
    checkpoint.save(tmp_path / "a.safetensors", endless)
    assert checkpoint.load(tmp_path / "a.safetensors").env == endless.env


def test_the_test_s_own_forger_makes_valid_files(file, forge):
    before = checkpoint.load(file)
    assert_same(checkpoint.load(forge()), before)


# Digests.


def test_digests_leave_out_machine_files_and_evaluations(cartpole, tmp_path):
    one = checkpoint.save(tmp_path / "one.safetensors", cartpole)
    elsewhere = dataclasses.replace(
        cartpole,
        fingerprint={"core": "another"},
        line_counts=(0, 0),
        best=None,
        evaluation=None,
    )
    other = checkpoint.save(tmp_path / "other.safetensors", elsewhere)
    assert (one.state_digest, one.digest) == (other.state_digest, other.digest)
    again = checkpoint.save(
        tmp_path / "one.safetensors", checkpoint.load(tmp_path / "one.safetensors")
    )
    assert (one.state_digest, one.digest) == (again.state_digest, again.digest)


def test_digests_cover_every_tensor_and_counter(cartpole, tmp_path):
    path = tmp_path / "a.safetensors"
    snapshot = cartpole.snapshot
    seen = {checkpoint.save(path, cartpole).state_digest}

    def bumped(array):
        array = np.array(array)
        array.reshape(-1)[:1] += 1
        return array

    variants = []
    for group in ("policy", "learner", "behaviour"):
        for name, array in getattr(snapshot, group).items():
            changed = {**getattr(snapshot, group), name: bumped(array)}
            variants.append(dataclasses.replace(snapshot, **{group: changed}))
    state = dataclasses.replace(snapshot.states[1][0], episode_return=0.5)
    states = (snapshot.states[0], (state, *snapshot.states[1][1:]))
    variants.append(dataclasses.replace(snapshot, states=states))
    for name in ("iteration", "steps", "episodes", "evaluations"):
        value = getattr(snapshot.progress, name) + 1
        progress = dataclasses.replace(snapshot.progress, **{name: value})
        variants.append(dataclasses.replace(snapshot, progress=progress))
    for variant in variants:
        whole = dataclasses.replace(
            cartpole, snapshot=variant, policy=variant.policy, progress=variant.progress
        )
        seen.add(checkpoint.save(path, whole).state_digest)
    assert len(seen) == len(variants) + 1


def test_the_digest_is_of_the_recipe_too(cartpole, tmp_path):
    one = checkpoint.save(tmp_path / "a.safetensors", cartpole)
    recipe = cartpole.recipe.model_copy(update={"stop_at_steps": 10_000})
    other = checkpoint.save(
        tmp_path / "a.safetensors", dataclasses.replace(cartpole, recipe=recipe)
    )
    assert one.state_digest == other.state_digest
    assert one.digest != other.digest


def test_the_order_of_the_metadata_means_nothing(file):
    before = checkpoint.load(file)
    header, body = taken_apart(file.read_bytes())
    texts = list(header["__metadata__"].items())
    for seed in range(5):
        random.Random(seed).shuffle(texts)
        file.write_bytes(put_together({**header, "__metadata__": dict(texts)}, body))
        assert_same(checkpoint.load(file), before)


def test_equal_checkpoints_are_equal_files(cartpole, tmp_path):
    # safetensors itself writes metadata in a different order in each call.
    paths = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for path in paths:
        checkpoint.save(path, cartpole)
    assert len({path.read_bytes() for path in paths}) == 1
    header, body = taken_apart(paths[0].read_bytes())
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert (len(paths[0].read_bytes()) - len(body)) % 8 == 0


def test_a_field_that_a_later_version_adds_leaves_older_files_valid(file, forge):
    _, metadata = tensors_of(file.read_bytes())
    recipe = json.loads(metadata["recipe"])
    del recipe["learning"]["network"]["observation_clip"]
    older = checkpoint.load(forge(metadata={"recipe": json.dumps(recipe)}))
    assert older.recipe.learning.network.observation_clip == 10.0


def test_a_setting_of_another_version_is_named(file, forge):
    _, metadata = tensors_of(file.read_bytes())
    recipe = json.loads(metadata["recipe"])
    recipe["learning"]["ppo"]["desired_kl"] = 0.01
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(forge(metadata={"recipe": json.dumps(recipe)}))
    assert "learning.ppo.desired_kl" in caught.value.message
    assert "damaged" not in caught.value.message


@pytest.mark.parametrize("shape", [[2], [3, 2], [-1, -3], []])
def test_actions_of_a_shape_that_cannot_be_are_refused(hopper, tmp_path, shape):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, hopper)
    tensors, metadata = tensors_of(path.read_bytes())
    env = json.loads(metadata["environment"])
    assert env["action_shape"] == [3]
    forged(path, tensors, {**metadata, "environment": json.dumps({**env, "action_shape": shape})})
    refused(path)
    del env["action_shape"]
    forged(path, tensors, {**metadata, "environment": json.dumps(env)})
    assert checkpoint.load(path).env.action_shape is None


def test_what_differs_between_machines_is_named():
    here = read_versions()
    there = {**here, "numpy": "1.0", "python": "3.0"}
    assert machine.find_fingerprint_differences(here, here) == []
    (line,) = machine.find_fingerprint_differences(here, there)
    assert line == f"numpy: {here['numpy']} -> 1.0"


def test_what_makes_gradients_is_compared_where_both_sides_make_them():
    numpy, torch = (
        compute_environment_fingerprint(LearningSettings(provider=provider))
        for provider in ("numpy", "torch")
    )
    assert "torch" not in numpy
    facts = {"torch": metadata.version("torch"), "cpu_vendor": machine.read_cpu_vendor()}
    assert torch == {**numpy, **facts}
    differences = machine.find_fingerprint_differences
    assert differences({**torch, "cpu_vendor": "other"}, torch)
    assert differences(torch, numpy) == differences(numpy, torch) == []
    assert differences({**torch, "torch": "1.0"}, torch) == [f"torch: 1.0 -> {torch['torch']}"]


# Damage.


def test_a_file_cut_anywhere_is_refused(cartpole, tmp_path):
    path = tmp_path / "p.safetensors"
    checkpoint.save(path, checkpoint.make_policy_checkpoint(cartpole, None))
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        refused(path)


def test_a_file_with_more_at_its_end_is_refused(file):
    for extra in (b"\0", b"x" * 100):
        file.write_bytes(file.read_bytes() + extra)
        refused(file)


def test_a_file_with_any_bit_flipped_is_refused(file):
    data = bytearray(file.read_bytes())
    bits = random.Random(0)
    places = [*range(8 * 16), *(bits.randrange(8 * len(data)) for _ in range(1500))]
    with file.open("r+b") as opened:
        for place in places:
            for value in (data[place // 8] ^ 1 << place % 8, data[place // 8]):
                opened.seek(place // 8)
                opened.write(bytes([value]))
                opened.flush()
                if value != data[place // 8]:
                    refused(file)
    checkpoint.load(file)


def test_bytes_of_no_meaning_are_refused(tmp_path):
    path = tmp_path / "noise.safetensors"
    noise = random.Random(0)
    for size in range(200):
        body = noise.randbytes(size)
        path.write_bytes(body)
        refused(path)
        path.write_bytes(struct.pack("<Q", size) + b"{" + body)
        refused(path)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (Path(self.mark),))


def test_a_header_of_any_length_is_read(cartpole, tmp_path):
    """The header's length, at the start of a file, may look like a pickle."""
    path, firsts = tmp_path / "a.safetensors", set()
    for padding in range(64):
        marked = {**cartpole.fingerprint, "note": "x" * 8 * padding}
        checkpoint.save(path, dataclasses.replace(cartpole, fingerprint=marked))
        firsts.add(path.read_bytes()[:1])
        assert checkpoint.load(path).fingerprint == marked
    assert b"\x80" in firsts


def test_pickles_are_never_opened(tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "a.safetensors"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Bomb(mark), protocol))
        refused(path)
    assert "pickle" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(mark)))
    assert "zip" in refused(path)
    assert not mark.exists()


def test_a_pickle_inside_is_data_like_any_other(file, forge):
    """The bytes of a pickle in place of an array are refused as an invalid array."""
    mark = file.with_name("mark")
    bomb = np.frombuffer(pickle.dumps(Bomb(mark)), np.uint8)
    refused(forge({"envs": bomb}))
    assert not mark.exists()


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 200_000_000, 1, 0])
def test_an_impossible_header_is_refused(file, length):
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert "header" in refused(file) or length < 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"__metadata__":1}',
        '{"__metadata__":{"format":1,"recipe":{}}}',
        '{"__metadata__":{"format":"1","recipe":"{}"}}',
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"\ud800":1}',
        '{"a":NaN}',
    ],
    ids=range(9),
)
def test_a_header_that_is_something_else_is_refused(tmp_path, text):
    path = tmp_path / "a.safetensors"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    refused(path)


@pytest.mark.parametrize(
    "offsets",
    [[0, 4], [4, 0], [-8, 8], [0, 2**62], [2**63, 2**63 + 8], [0.5, 8.5], ["0", "8"], [], None],
    ids=str,
)
def test_offsets_that_overlap_or_leave_the_file_are_refused(file, offsets):
    header, body = taken_apart(file.read_bytes())
    header["learner.adam.count"]["data_offsets"] = offsets
    file.write_bytes(put_together(header, body))
    refused(file)


@pytest.mark.parametrize("shape", [[2], [2**62, 4], [-1], [0], [2**64], ["1"], None], ids=str)
def test_shapes_that_lie_about_the_bytes_are_refused(file, shape):
    header, body = taken_apart(file.read_bytes())
    header["learner.adam.count"]["shape"] = shape
    file.write_bytes(put_together(header, body))
    refused(file)


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3", "PICKLE", 8, None], ids=str)
def test_types_that_do_not_fit_the_bytes_are_refused(file, dtype):
    header, body = taken_apart(file.read_bytes())
    header["learner.adam.count"]["dtype"] = dtype
    file.write_bytes(put_together(header, body))
    refused(file)


def test_a_name_given_twice_is_refused(file):
    header, body = taken_apart(file.read_bytes())
    count = json.dumps(header["learner.adam.count"])
    file.write_bytes(put_together(header, body, f'"learner.adam.count":{count},'))
    assert "twice" in refused(file)
    file.write_bytes(put_together(header, body, '"__metadata__":{},'))
    assert "twice" in refused(file)


# Forgeries: the digests and the checksum are valid, but the contents are not.


@pytest.mark.parametrize(
    "name", ["policy.actor.0.weight", "learner.parameters", "behaviour.actor.1.bias"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(file, forge, name, value):
    tensors, _ = tensors_of(file.read_bytes())
    array = tensors[name]
    array.reshape(-1)[-1] = value
    assert name in refused(forge({name: array}))


def test_policies_of_another_shape_are_refused(file, forge):
    tensors, _ = tensors_of(file.read_bytes())
    name = "policy.actor.0.weight"
    weight, original = tensors[name], file.read_bytes()
    changes = [
        {name: weight.T.copy()},
        {name: weight.astype(np.float64)},
        {name: weight[:, :-1].copy()},
        {name: None},
        {"policy.actor.7.weight": weight},
        {"behaviour.actor.0.weight": None},
        {"envs": None},
    ]
    for change in changes:
        file.write_bytes(original)
        refused(forge(change))
    file.write_bytes(original)
    assert "stowaway" in refused(forge({"stowaway": weight}))


def test_learners_of_another_shape_are_refused_before_the_first_step(file, forge):
    original = file.read_bytes()
    tensors, _ = tensors_of(original)
    names = [name for name in tensors if name.startswith("learner.")]
    assert len(names) > 10
    for name, change in itertools.product(names, ("missing", "longer", "other type")):
        array = tensors[name]
        if change == "missing":
            new = None
        elif change == "longer":
            new = np.concatenate([array.reshape(-1), array.reshape(-1)])
        else:
            new = array.astype(np.float64 if array.dtype != np.float64 else np.float32)
        file.write_bytes(original)
        loaded = checkpoint.load(forge({name: new}))
        with (
            pytest.raises(RlflameError, match=name.removeprefix("learner.")),
            InlineFleet() as fleet,
        ):
            components.make_trainer(loaded, fleet, Nobody(), Nobody(), "run")


@pytest.mark.parametrize("version", ["2", "99999999999999999999999", "²", "-1", "", "1.5"])
def test_a_format_from_the_future_is_refused(forge, version):
    assert "format" in refused(forge(metadata={"format": version}))


def with_state(whole, **changes):
    """The environment states of a checkpoint, with the first one changed."""
    (first, *rest), *slots = whole.snapshot.states
    return ((dataclasses.replace(first, **changes), *rest), *slots)


def test_environment_states_that_do_not_fit_are_refused(file, forge, cartpole):
    states, original = cartpole.snapshot.states, file.read_bytes()
    first = states[0][0]
    assert first.kind == "replay"
    wrong = [
        states[:1],
        (*states, states[0]),
        (states[0][:1], *states[1:]),
        [1, 2],
        {"a": 1},
        with_state(cartpole, observation=np.zeros(3, np.float32)),
        with_state(cartpole, elapsed=first.elapsed + 1),
        with_state(cartpole, elapsed=0),
        with_state(cartpole, actions=first.actions[:0]),
        with_state(cartpole, actions=first.actions.astype(np.int32)),
        with_state(cartpole, actions=np.zeros((first.elapsed, 2), np.int64)),
        with_state(cartpole, kind="fresh"),
    ]
    for value in wrong:
        file.write_bytes(original)
        refused(forge({"envs": np.frombuffer(wire.encode(value), np.uint8)}))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("recipe", "{}"),
        ("recipe", "not JSON"),
        ("recipe", '{"stop_at_steps":-1}'),
        ("recipe", '{"stop_at_steps":1,"later":1}'),
        ("recipe", '{"stop_at_steps":1,"learning":{"rollout":{"num_slots":7}}}'),
        ("recipe", '{"stop_at_steps":1,"learning":{"rollout":{"envs_per_slot":4096}}}'),
        ("environment", "{}"),
        ("environment", "[]"),
        ("policy", "null"),
        ("policy", "[" * 100_000),
        ("committed", "[1]"),
        ("committed", "[-1,0]"),
        ("committed", '["1","2"]'),
        ("fingerprint", '{"a":1}'),
        ("best", '{"mean":1}'),
        ("evaluation", "7"),
        ("kind", "policy"),
    ],
)
def test_texts_that_are_not_what_they_should_be_are_refused(forge, field, text):
    refused(forge(metadata={field: text}))


@pytest.mark.parametrize(
    "field", ["recipe", "environment", "policy", "progress", "fingerprint", "best", "evaluation"]
)
def test_names_that_stand_twice_in_a_text_are_refused(file, forge, field):
    _, metadata = tensors_of(file.read_bytes())
    name, value = next(iter(json.loads(metadata[field]).items()))
    again = f"{{{json.dumps(name)}:{json.dumps(value)},{metadata[field][1:]}"
    assert "twice" in refused(forge(metadata={field: again}))


@pytest.mark.parametrize("field", ["recipe", "environment", "policy", "best", "evaluation"])
def test_fields_that_nobody_knows_are_refused(file, forge, field):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata[field]), "later": 1}
    assert "later" in refused(forge(metadata={field: json.dumps(changed)}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("stop_at_steps",), "64"),
        (("stop_at_steps",), 2**63),
        (("stop_at_steps",), 10**400),
        (("learning", "seed"), "1"),
        (("learning", "seed"), True),
        (("learning", "horizon_steps"), 10**30),
        (("learning", "network", "orthogonal_init"), 1),
        (("learning", "environment", "max_episode_steps"), 0),
        (("evaluation", "every_steps"), 2**63),
        (("evaluation", "max_episode_steps"), 10**30),
    ],
    ids=str,
)
def test_settings_of_another_type_or_beyond_64_bits_are_refused(file, forge, path, value):
    _, metadata = tensors_of(file.read_bytes())
    recipe = json.loads(metadata["recipe"])
    *sections, name = path
    section = recipe
    for part in sections:
        section = section[part]
    section[name] = value
    refused(forge(metadata={"recipe": json.dumps(recipe)}))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"[]," * 4_000_000 + b"[]]}",
        b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}",
        b'{"a":"' + b'\\"' * 6_000_000 + b'"}',
        b'{"a":' + b'"' * 12_000_000 + b"}",
    ],
    ids=["lists", "names", "escapes", "quotes"],
)
def test_a_header_of_millions_of_values_costs_no_memory(tmp_path, text):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    tracemalloc.start()
    try:
        refused(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(text)


@pytest.mark.parametrize("field", ["kind", "best", "committed"])
def test_texts_that_are_missing_are_named(forge, field):
    assert f"lacks {field}" in refused(forge(metadata={field: None}))


@pytest.mark.parametrize(
    "progress",
    [
        *({"steps": steps} for steps in ("1", None, -5, True, 65.0, 10**30, 65, 1, 0)),
        *({"iteration": number} for number in (-1, 0, 65, 10**30)),
        *({"episodes": number} for number in (-1, 65)),
        *({"evaluations": number} for number in (-1, 1)),
        {"iteration": 2**63, "steps": 2**63 * 32},
        {"reached": 3},
    ],
    ids=str,
)
def test_counters_that_are_no_run_s_are_refused(file, forge, progress):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata["progress"]), **progress}
    refused(forge(metadata={"progress": json.dumps(changed)}))


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("policy", {"width": 10**12}),
        ("policy", {"observation_size": 10**12}),
        ("policy", {"action_size": 3}),
        ("policy", {"activation": "exec"}),
        ("policy", {"activation": "relu"}),
        ("policy", {"observation_clip": 1.0}),
        ("policy", {"normalise": False}),
        ("policy", {"squash": True}),
        ("policy", {"hidden": [8, 8]}),
        ("environment", {"observation_size": 10**12}),
        ("environment", {"action_kind": "continuous"}),
        ("environment", {"action_low": [0.0]}),
        ("environment", {"action_shape": [2]}),
        ("environment", {"action_counts": [10**12]}),
        ("environment", {"action_counts": [2], "mask_source": "info"}),
        ("environment", {"action_start": 2**63}),
        ("environment", {"action_start": -(2**64)}),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(file, forge, which, change):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata[which]), **change}
    refused(forge(metadata={which: json.dumps(changed)}))


def test_an_environment_that_the_recipe_does_not_name_is_refused(file, forge):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata["environment"]), "id": "evil_module:Other-v0"}
    message = refused(forge(metadata={"environment": json.dumps(changed)}))
    assert '"CartPole-v1"' in message
    assert '"evil_module:Other-v0"' in message


@pytest.mark.parametrize(
    "change",
    [
        {"kwargs": {"sutton_barto_reward": True}},
        {"kwargs": {"render_mode": "human"}},
        {"max_episode_steps": 0},
        {"max_episode_steps": 7},
        {"max_episode_steps": 10**30},
    ],
    ids=str,
)
def test_an_environment_made_unlike_the_recipe_is_refused(file, forge, change):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata["environment"]), **change}
    (name,) = change
    message = refused(forge(metadata={"environment": json.dumps(changed)}))
    assert name in message or "exceeds 64 bits" in message


@pytest.mark.parametrize(
    ("recorded", "accepted"),
    [
        ({"sutton_barto_reward": True}, True),
        ({"sutton_barto_reward": 1}, False),
        ({"sutton_barto_reward": False}, False),
        ({}, False),
    ],
    ids=str,
)
def test_an_environment_s_arguments_are_those_of_the_recipe(file, forge, recorded, accepted):
    _, metadata = tensors_of(file.read_bytes())
    recipe, env = (json.loads(metadata[name]) for name in ("recipe", "environment"))
    recipe["learning"]["environment"] |= {
        "kwargs": {"sutton_barto_reward": True},
        "max_episode_steps": 7,
    }
    env |= {"kwargs": recorded, "max_episode_steps": 7}
    forge(metadata={"recipe": json.dumps(recipe), "environment": json.dumps(env)})
    if accepted:
        assert checkpoint.load(file).env.kwargs == recorded
    else:
        assert "kwargs" in refused(file)


@pytest.mark.parametrize("mode", ["human", "rgb_array", ["human"], None], ids=str)
def test_a_render_mode_is_refused_even_where_recipe_and_environment_agree(file, forge, mode):
    _, metadata = tensors_of(file.read_bytes())
    recipe, env = (json.loads(metadata[name]) for name in ("recipe", "environment"))
    kwargs = {"render_mode": mode}
    recipe["learning"]["environment"]["kwargs"] = env["kwargs"] = kwargs
    assert "render_mode" in refused(
        forge(metadata={"recipe": json.dumps(recipe), "environment": json.dumps(env)})
    )


@pytest.mark.parametrize("which", ["best", "evaluation"])
@pytest.mark.parametrize(
    "change",
    [
        {"episodes": 10**12},
        {"episodes": 0, "returns": [], "lengths": []},
        {"episodes": 1},
        {"returns": [1.0]},
        {"lengths": [1]},
        {"seed": -1},
        {"seed": 2**63},
        {"max_episode_steps": 0},
        {"max_episode_steps": 1},
        {"max_episode_steps": 10**30},
        {"stochastic": 1},
        {"min": 1e6},
        {"low": 2.0, "high": 1.0},
        {"std": -1.0},
        *({name: np.nan} for name in ("mean", "std", "iqm", "low", "high", "length_mean")),
        *({name: np.inf} for name in ("mean", "std", "min", "max")),
        {"mean": 10**400},
    ],
    ids=str,
)
def test_records_that_contradict_themselves_are_refused(file, forge, which, change):
    _, metadata = tensors_of(file.read_bytes())
    changed = {**json.loads(metadata[which]), **change}
    message = refused(forge(metadata={which: json.dumps(changed)}))
    sentences = (f"its {which} record", "EvaluationRecord", "exceeds 64 bits")
    assert any(sentence in message for sentence in sentences)


def test_reading_takes_memory_in_proportion_to_the_file(file, forge, tmp_path):
    _, metadata = tensors_of(file.read_bytes())
    huge = {**json.loads(metadata["policy"]), "width": 10**12}
    forge(metadata={"policy": json.dumps(huge)})
    lying = tmp_path / "b.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    lying.write_bytes(struct.pack("<Q", len(header)) + header)
    deep = tmp_path / "c.safetensors"
    body = b'{"a":' + b"[" * 50_000
    deep.write_bytes(struct.pack("<Q", len(body)) + body)
    for path in (file, lying, deep):
        tracemalloc.start()
        try:
            refused(path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 20 * path.stat().st_size + 2_000_000


# Other files.


def test_what_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    assert "does not exist" in refused(tmp_path / "absent.safetensors")
    assert "Is a directory" in refused(tmp_path)
    empty = tmp_path / "empty.safetensors"
    empty.touch()
    refused(empty)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe" in refused(tmp_path / "pipe")
    refused(tmp_path / ("x" * 300))

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    assert "Permission denied" in refused(empty)


def test_a_file_larger_than_memory_is_refused_before_it_is_read(file, monkeypatch):
    monkeypatch.setattr(safetensors_file, "measure_available_bytes", lambda: file.stat().st_size)
    assert "memory" in refused(file)


def test_other_people_s_safetensors_are_refused(tmp_path):
    import safetensors.numpy

    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path, {"format": "pt"})
    assert "rlflame did not write it" in refused(path)


# Writing.


def test_a_failed_write_leaves_the_old_file_and_nothing_else(file, cartpole, monkeypatch):
    before = file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpoint.save(file, cartpole)
        assert file.read_bytes() == before
        assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_files_are_readable_as_the_user_s_mask_says(cartpole, tmp_path):
    path, plain = tmp_path / "a.safetensors", tmp_path / "plain"
    checkpoint.save(path, cartpole)
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_records_are_printed_by_stable_names():
    """`--json` prints these names, so changing one breaks other programs."""
    assert [field.name for field in dataclasses.fields(EvaluationRecord)] == [
        "episodes",
        "seed",
        "stochastic",
        "max_episode_steps",
        "mean",
        "std",
        "iqm",
        "low",
        "high",
        "min",
        "max",
        "length_mean",
        "returns",
        "lengths",
    ]


@pytest.mark.parametrize("name", ["policy", "learner", "envs.x", "other.x"])
def test_a_tensor_that_no_part_owns_is_refused(forge, name):
    assert name in refused(forge(tensors={name: np.zeros(1, np.float32)}))
