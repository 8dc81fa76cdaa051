"""SAC on a device, run on the CPU: compared with a plain float64 loop and with numpy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from device_graphs import refuse_uncaptured, run_after_warm_up
from replays import World, buffer_for
from sac_cases import ACTIONS, OBSERVATIONS, Plain, learner, networks, owed, transitions

from rlflame.config.algorithms import SacSettings
from rlflame.errors import LearningError
from rlflame.learning.base import ReplayBatch
from rlflame.learning.device import chunks
from rlflame.learning.device.graph import UpdateGraph
from rlflame.learning.networks.flat_vector import normalise_observations
from rlflame.learning.sac import sac_device
from rlflame.learning.sac.sac_device import DeviceSac

SETTINGS = {
    "default": {},
    "everything else": {
        "critic_learning_rate": 2e-3,
        "entropy_learning_rate": 5e-3,
        "policy_delay": 2,
        "target_update_interval": 3,
        "target_update_rate": 0.1,
        "max_gradient_norm": 0.2,
    },
    "fixed entropy": {"entropy_coefficient": 0.1, "adam_epsilon": 1e-5},
    "other entropy": {"initial_entropy_coefficient": 0.3, "target_entropy": -1.5},
}
KINDS = {
    "plain": {},
    "tanh": {"activation": "tanh"},
    "gsde": {"exploration": "gsde"},
    "batch": {"norm": "batch"},
    "quantiles": {"quantiles": 5, "drop_count": 1},
    "quantiles and batch": {"norm": "batch", "quantiles": 5, "drop_count": 1},
}


def make_settings(case, kind="plain"):
    given = SETTINGS[case]
    if "batch" in kind:
        given = {n: v for n, v in given.items() if not n.startswith("target_update")}
    return SacSettings(**({"learning_rate": 1e-3} | given))


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_float64_updates_are_those_of_a_plain_loop(case, kind):
    settings, nets = make_settings(case, kind), networks(**KINDS[kind])
    plain = Plain(nets, settings)
    device = DeviceSac(settings, nets, seed=7, dtype=torch.float64)
    for number in range(100):
        plain.update(number, transitions(number))
    device.update(owed(0, 70), 0.0)
    device.update(owed(70, 30), 0.0)
    pairs = [(plain.actor, device._actor.values), (plain.critics, device._critics.values)]
    if device._targets is not None:
        pairs.append((plain.targets, device._targets.values))
    if device._moments is not None:
        pairs.append((plain.running, device._moments._running))
    for weights, values in pairs:
        expected = torch.cat([tensor.detach().flatten() for tensor in weights.values()])
        assert (values.flatten() - expected).abs().max() < 1e-9
    if not plain.is_fixed:
        weight = float(plain.log_weight.detach())
        assert float(device._log_weight_tensor) == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_updates_are_close_to_numpys(case, kind):
    settings = make_settings(case, kind)
    for updates, limit in ((1, 1e-5), (20, 1e-3)):
        ours, theirs = networks(**KINDS[kind]), networks(**KINDS[kind])
        device = DeviceSac(settings, ours, seed=7)
        metrics = device.update(owed(0, updates), 0.1)
        device.get_state()  # copies all weights to `ours`
        wanted = learner(settings, theirs).update(owed(0, updates), 0.1)
        assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for name in ("actor", "critics", "targets"):
            found, expected = getattr(ours, name).data, getattr(theirs, name).data
            if len(found):
                assert np.abs(found - expected).max() < limit


def test_normalised_observations_are_those_of_numpy():
    pairs, settings = [], SacSettings()
    for make in (
        lambda nets: DeviceSac(settings, nets, seed=7),
        lambda nets: learner(settings, nets),
    ):
        nets = networks()
        nets = dataclasses.replace(nets, spec=dataclasses.replace(nets.spec, normalise=True))
        made = make(nets)
        state = made.get_state()
        rng = np.random.default_rng(5)
        state["normaliser.count"] = np.array(10.0)
        state["normaliser.mean"] = rng.standard_normal(5)
        state["normaliser.squares"] = rng.uniform(1.0, 40.0, 5)
        made.load_state(state)
        fresh = type("Fresh", (), {"observations": np.ones((3, 2, 5), np.float32),
                                   "valid": np.ones((3, 2), bool)})  # fmt: skip
        batch = ReplayBatch(fresh, 0, 5, transitions)
        pairs.append((made.update(batch, 0.0), nets))
        made.get_state()  # copies all weights to `nets`
    (metrics, ours), (wanted, theirs) = pairs
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(ours.critics.data, theirs.critics.data, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_bit_by_bit(kind):
    settings = make_settings("everything else", kind)
    straight = DeviceSac(settings, networks(**KINDS[kind]), seed=7)
    resumed = DeviceSac(settings, networks(seed=3, **KINDS[kind]), seed=7)
    straight.update(owed(0, 70), 0.0)
    resumed.load_state(straight.get_state())
    assert straight.update(owed(70, 9), 0.5) == resumed.update(owed(70, 9), 0.5)
    state = resumed.get_state()
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(state[name], array)


def test_the_state_has_the_form_of_numpys():
    nets = networks(norm="batch")
    ours, theirs = DeviceSac(SacSettings(), nets, seed=7), learner(SacSettings(), nets)
    shapes = [
        {name: (array.dtype, array.shape) for name, array in made.get_state().items()}
        for made in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("field", ["rewards", "observations"])
def test_an_update_that_is_not_finite_changes_nothing_and_the_fifth_in_a_row_ends_the_run(field):
    def draw(update):
        drawn = transitions(update)
        if update in bad:
            getattr(drawn, field)[0] = math.inf
        return drawn

    device = DeviceSac(SacSettings(), networks(), seed=7)
    bad = {0, 1, 2}
    before = device.get_state()
    metrics = device.update(ReplayBatch(None, 0, 3, draw), 0.0)
    assert metrics["refused_minibatches"] == 3.0
    assert all(map(math.isfinite, metrics.values()))
    after = device.get_state()
    assert {n for n in after if not np.array_equal(after[n], before[n])} == {"guard"}
    device.update(ReplayBatch(None, 3, 2, draw), 0.0)
    bad = set(range(5, 10))
    with pytest.raises(LearningError, match="not finite 5 times in a row"):
        device.update(ReplayBatch(None, 5, 5, draw), 0.0)


@pytest.mark.parametrize("given", [{"policy_delay": 64}, {"target_update_interval": 63}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_changes_nothing_before_its_first_run(kind, given, monkeypatch):
    """On a GPU, the function runs several times before the capture."""
    if "batch" in kind:
        given = {"policy_delay": 64}
    settings = SacSettings(**given)
    plain, other = (DeviceSac(settings, networks(**KINDS[kind]), seed=7) for _ in range(2))
    wanted = plain.update(owed(1, 70), 0.0)
    monkeypatch.setattr(UpdateGraph, "run", run_after_warm_up)
    assert other.update(owed(1, 70), 0.0) == wanted
    state = other.get_state()
    for name, array in plain.get_state().items():
        np.testing.assert_array_equal(state[name], array)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_can_capture_all_operations(kind, monkeypatch):
    monkeypatch.setattr(UpdateGraph, "run", refuse_uncaptured)
    world, made, buffers = make_replays(kind, "everything else", n_step=3, updates_per_step=0.25)
    learn(world, made, buffers, [6])


def test_an_error_of_the_replay_leaves_no_arrays_for_the_next_update():
    def draw(update):
        if update == 3:
            raise OSError("the replay is gone")
        return transitions(update)

    plain, other = (DeviceSac(SacSettings(), networks(), seed=7) for _ in range(2))
    before = other.get_state()
    with pytest.raises(OSError, match="the replay is gone"):
        other.update(ReplayBatch(None, 0, 5, draw), 0.0)
    other.load_state(before)
    assert other.update(owed(0, 5), 0.0) == plain.update(owed(0, 5), 0.0)


# The replay on the device.


def normalised(nets):
    return dataclasses.replace(nets, spec=dataclasses.replace(nets.spec, normalise=True))


def make_replays(kind="plain", case="default", normalise=True, **replay):
    """Two learners with equal buffers; the first samples on the device, the second on the CPU."""
    world = World(2, 2, np.random.default_rng(8), 0.3, OBSERVATIONS, ACTIONS)
    nets = [networks(**KINDS[kind]) for _ in range(2)]
    nets = [normalised(one) for one in nets] if normalise else nets
    made = [DeviceSac(make_settings(case, kind), one, seed=7) for one in nets]
    buffers = [buffer_for(world, 90, **replay) for _ in range(2)]
    assert made[0].keep_replay(buffers[0]) is None
    return world, made, buffers


def learn(world, made, buffers, iterations):
    """Return the metrics of each learner in each iteration."""
    metrics = []
    for steps in iterations:
        fragments = world.iteration(steps)
        for fragment in fragments:
            fragment.observations[:] /= 50.0
        for buffer in buffers:
            buffer.add(fragments, {})
        batches = [next(buffer.take_batches()) for buffer in buffers]
        metrics.append([one.update(batch, 0.1) for one, batch in zip(made, batches, strict=True)])
    return metrics


def assert_same_state(one, other):
    state = other.get_state()
    for name, array in one.get_state().items():
        assert array.tobytes() == state[name].tobytes(), name


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("case", ["default", "everything else"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_on_the_device_and_one_in_cpu_memory_give_the_same_bits(kind, case, n_step):
    """Each of the four columns has 23 rows, which 38 steps exceed."""
    replay = {"n_step": n_step, "updates_per_step": 0.5, "learning_starts": 20, "batch_size": 31}
    world, made, buffers = make_replays(kind, case, **replay)
    for on_device, on_cpu in learn(world, made, buffers, [3, 9, 1, 25]):
        assert on_device == on_cpu
    assert made[0]._updates.value > 30
    assert_same_state(*made)


def test_a_run_can_move_its_replay_to_the_device_and_back_when_it_is_resumed():
    replay = {"n_step": 2, "updates_per_step": 0.25}
    world, made, buffers = make_replays(**replay)
    learn(world, made, buffers, [9, 20])
    _, resumed, new_buffers = make_replays(**replay)
    for place in range(2):
        resumed[place].load_state(made[1 - place].get_state())
        old = buffers[1 - place]
        new_buffers[place].load_state(old.get_state(), old.list_segments())
    learn(world, [*made, *resumed], [*buffers, *new_buffers], [5, 17])
    for other in (made[1], *resumed):
        assert_same_state(made[0], other)


def test_a_graph_reads_the_replay_of_later_iterations(monkeypatch):
    """The graph is captured in the first iteration."""
    replay = {"n_step": 2, "updates_per_step": 0.25}
    world, made, buffers = make_replays(**replay)
    monkeypatch.setattr(UpdateGraph, "run", run_after_warm_up)
    learn(world, made[:1], buffers[:1], [5, 9, 20])
    monkeypatch.undo()
    world, plain, buffers = make_replays(**replay)
    learn(world, plain[1:], buffers[1:], [5, 9, 20])
    assert_same_state(made[0], plain[1])


@pytest.mark.parametrize("n_step", [1, 3])
def test_minibatches_lie_in_memory_in_the_same_way(n_step, monkeypatch):
    """The kernels that a GPU chooses for a matrix product may depend on it."""
    world, made, buffers = make_replays(n_step=n_step, normalise=False)
    places = [], []
    for one, place in zip(made, places, strict=True):

        def note(pair, next_pair, place=place, whole=one._compute_both_values):
            place.extend((*pair, next_pair[0]))
            return whole(pair, next_pair)

        monkeypatch.setattr(one, "_compute_both_values", note)
    learn(world, made, buffers, [6])
    assert len(places[0]) == len(places[1]) > 20
    for first, second in zip(*places, strict=True):
        assert first.stride() == second.stride()
        assert first.storage_offset() == second.storage_offset()
        np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_observations_are_normalised_with_the_bits_of_numpy(monkeypatch):
    world, made, buffers = make_replays()
    seen = []
    whole = made[0]._normalise
    monkeypatch.setattr(made[0], "_normalise", lambda raw: seen.append(whole(raw)) or seen[-1])
    learn(world, made[:1], buffers[:1], [5])
    statistics = made[0]._normaliser.make_arrays()
    for update in range(20):
        drawn = buffers[0].draw(update)
        for raw, found in zip(
            (drawn.observations, drawn.next_observations), seen[2 * update :], strict=False
        ):
            expected = normalise_observations(raw, statistics, made[0]._networks.spec)
            assert found.numpy().tobytes() == expected.tobytes()


def test_fewer_updates_are_sent_together_if_they_are_large(monkeypatch):
    world, made, buffers = make_replays()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    learn(world, made[:1], buffers[:1], [9, 5])
    assert len(made[0]._chunks._chunk) == 3
    monkeypatch.undo()
    world, whole, buffers = make_replays()
    learn(world, whole[:1], buffers[:1], [9, 5])
    assert_same_state(made[0], whole[0])


def test_a_replay_that_does_not_fit_stays_in_cpu_memory_and_a_note_says_so(monkeypatch):
    buffer = buffer_for(World(2, 2, np.random.default_rng(8), 0.3, OBSERVATIONS, ACTIONS), 90_000)
    device = DeviceSac(SacSettings(), networks(), seed=7)
    # Five observed numbers twice, three actions and three more numbers: 5.76 MB.
    monkeypatch.setattr(sac_device, "measure_free_bytes", lambda device: 5_759_999)
    note = device.keep_replay(buffer)
    assert device._replay is None
    assert "\n" not in note
    assert "stays in CPU memory: it takes 6 MB" in note
    monkeypatch.setattr(sac_device, "measure_free_bytes", lambda device: 5_760_000)
    assert device.keep_replay(buffer) is None


def test_a_replay_that_another_process_leaves_no_memory_for_stays_in_cpu_memory(monkeypatch):
    def fail(buffer, device):
        raise torch.OutOfMemoryError

    world, made, buffers = make_replays()
    monkeypatch.setattr(sac_device, "DeviceReplay", fail)
    assert "stays in CPU memory" in made[1].keep_replay(buffers[1])
    learn(world, made, buffers, [5])
    assert_same_state(*made)


def test_a_batch_of_another_replay_is_refused():
    _, made, _ = make_replays(normalise=False)
    with pytest.raises(AssertionError):
        made[0].update(owed(0, 1), 0.0)
