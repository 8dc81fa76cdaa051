"""Run rlflame on forged, damaged and special files, and count the outcomes.

    python benchmarks/hostile.py            # all attempts, in some minutes
    python benchmarks/hostile.py --quick    # a selection, in some seconds
    python benchmarks/hostile.py --docs     # also write the table into docs/guides/security.md

Each attempt calls rlflame's `main` in a forked process, so that a crash, a hang or excessive memory
ends only this attempt. The script recomputes the checksum and the digests of each changed
checkpoint, so that the attempts test the checks behind them. The exit code is 1 if any attempt
ends in a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from script import ended

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "checkpoints"
GUIDE = ROOT / "docs" / "guides" / "security.md"
BEGIN, END = "<!-- hostile:begin -->", "<!-- hostile:end -->"
SEED = 0
#: An attempt that takes longer is interrupted. If it does not end then, it counts as a hang.
LIMIT_S = 60.0
GRACE_S = 20.0
#: An attempt that uses more memory counts as a fault. Refusing a small file needs far less.
MEMORY_BYTES = 1_500_000_000
ADDRESS_BYTES = 16 << 30
#: Control characters of terminals. This list does not reuse rlflame's own, to reveal gaps in it.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: Names that the standard library or torch try to import and that most systems do not have.
ABSENT = ("org", "nt", "_winapi", "msvcrt", "winreg", "tqdm", "pynvml")
MODULE = """from pathlib import Path
import gymnasium
Path({trace!r}).touch()
gymnasium.register("Env-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""
REFUSED, ACCEPTED = "refused", "accepted"
Write = Callable[[Path], None]


@dataclass(frozen=True)
class Attempt:
    """One command, and the files in its folder."""

    kind: str
    name: str
    words: tuple[str, ...]
    prepare: Write
    #: The command may run until it is interrupted, because a file can request any number of
    #: episodes.
    endless: bool = False
    quick: bool = True
    limit_s: float = LIMIT_S


class Forgery:
    """A checkpoint with changeable metadata and tensors, and a valid checksum."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        self.strings: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
        self.tensors = {n: a.copy() for n, a in safetensors.numpy.load(data).items()}

    def put(self, name: str, text: str) -> Forgery:
        self.strings[name] = text
        return self

    def change(self, string: str, path: str, value: Any) -> Forgery:
        """Set a value in a JSON string. An empty `path` replaces the whole string."""
        table: Any = {"": json.loads(self.strings[string])}
        *folders, last = ["", *filter(None, path.split("."))]
        inner = table
        for folder in folders:
            inner = inner[folder]
        inner[last] = value
        return self.put(string, json.dumps(table[""]))

    def environment(self, name: str, value: Any) -> Forgery:
        """Change the environment in the recipe and in the environment's own metadata."""
        self.change("recipe", f"learning.environment.{name}", value)
        return self.change("environment", name, value)

    def fill(self, name: str, array: Any) -> Forgery:
        self.tensors[name] = np.asarray(array)
        return self

    def write(self, path: Path) -> None:
        with contextlib.suppress(ValueError, RecursionError, TypeError):  # not JSON
            self._sign()
        strings = {**self.strings, "checksum": "0" * 64}
        data = safetensors.numpy.save(self.tensors, strings)
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )
        text += b" " * (-len(text) % 8)
        whole = struct.pack("<Q", len(text)) + text + data[8 + length :]
        place = whole.index(b'"checksum":"') + 12
        checksum = hashlib.sha256(whole).hexdigest().encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[:place] + checksum + whole[place + 64 :])

    def _sign(self) -> None:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            array = self.tensors[name]
            digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
            digest.update(array.tobytes())
        progress = json.loads(self.strings["progress"])
        digest.update(json.dumps(progress, sort_keys=True).encode())
        state = self.strings["state_digest"] = digest.hexdigest()
        recipe = json.dumps(json.loads(self.strings["recipe"]), sort_keys=True)
        self.strings["digest"] = hashlib.sha256(f"{state}|{recipe}".encode()).hexdigest()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# Each generator yields the attempts of one class.

EVAL = ("eval", "f.safetensors", "--episodes", "1", "--workers", "1")
READERS = {
    "eval": EVAL,
    "render": ("render", "f.safetensors", "-o", "f.gif"),
    "export": ("export", "f.safetensors", "-o", "g.safetensors"),
    "onnx": ("export", "f.safetensors", "--onnx", "--check", "-o", "f.onnx"),
    "inspect": ("inspect", "f.safetensors"),
    "json": ("inspect", "--json", "f.safetensors"),
    "recipe": ("inspect", "--recipe", "f.safetensors"),
    "init": ("train", "--env", "cartpole", "--steps", "64", "--init-from", "f.safetensors",
             "--out", "new", "--workers", "1", "--quiet"),
}  # fmt: skip
STRINGS = (
    "recipe", "environment", "policy", "progress", "committed", "fingerprint", "best", "evaluation",
)  # fmt: skip
MODULES = (
    "evil", "evil.inner", "a:b", "evil:inner", "gymnasium.envs.classic_control", "__main__",
    "gymnasium_robotics.evil", "gymnasium_robotics", "os.path", "antigravity", "rlflame", "this",
    "ｅvil", "еvil", "ﬁlm", "_", "evil.", ".evil", "evil..x", "evil\n", " evil", "evil ", "EVIL",
    "sys", "builtins", "numpy.f2py", "pip.__main__", "org", "evil\x00", "\x1b[2Jevil",
)  # fmt: skip


def modules() -> Iterator[Attempt]:
    """Yield files that name a module of their folder; it creates a file if it runs."""

    def forge(id: str, kwargs: dict[str, Any]) -> Write:
        forgery = Forgery(SHIPPED / "cartpole.safetensors").environment("id", id)
        return lambda folder: forgery.environment("kwargs", kwargs).write(folder / "f.safetensors")

    def config(id: str) -> Write:
        text = f"[learning.environment]\nid = {json.dumps(id)}\n"
        return lambda folder: void((folder / "f.toml").write_text(text))

    for number, module in enumerate(MODULES):
        for reader in ("eval", "render", "onnx", "inspect"):
            quick = reader == "eval" and number < 8
            yield Attempt("module names", f"{module!r} {reader}", READERS[reader],
                          forge(f"{module}:Env-v0", {}), quick=quick)  # fmt: skip
        yield Attempt("module names", f"{module!r} config",
                      ("train", "--config", "f.toml", "--dry-run"),
                      config(f"{module}:Env-v0"), quick=number < 3)  # fmt: skip
        yield Attempt("module names", f"{module!r} env_id", EVAL,
                      forge("CartPole-v1", {"env_id": f"{module}:Env-v0"}),
                      quick=number < 3)  # fmt: skip
    for id in ("CartPole-v1:x", "evil:ns/Env-v0", "evil:Env-v0:x", "ALE/Pong-v5", "-rf", "..",
               "GymV21Environment-v0", "phys2d/CartPole-v1", "x" * 5000, "../x"):  # fmt: skip
        for reader in ("eval", "render"):
            yield Attempt("module names", f"id {id[:20]}", READERS[reader], forge(id, {}),
                          quick=False)  # fmt: skip
    yield Attempt(
        "module names", "packages for executors",
        ("train", "--config", "f.toml", "--dry-run"),
        lambda folder: void((folder / "f.toml").write_text(
            "[runtime.flame]\nextra_dependencies = ['evil']\n")),
    )  # fmt: skip
    yield Attempt(
        "module names", "environment file",
        ("train", "--config", "f.toml", "--dry-run"),
        lambda folder: void((folder / "f.toml").write_text("[runtime]\nenv_file = 'evil.py'\n")),
    )  # fmt: skip


def arguments() -> Iterator[Attempt]:
    """Yield environment arguments that name files or make an environment misbehave."""

    def forge(name: str, kwargs: dict[str, Any]) -> Write:
        def write(folder: Path) -> None:
            os.mkfifo(folder / "pipe.xml")
            (folder / "bomb.xml").write_text(
                '<!DOCTYPE x [<!ENTITY a "aaaa">]><mujoco model="&a;"/>'
            )
            Forgery(SHIPPED / f"{name}.safetensors").environment("kwargs", kwargs).write(
                folder / "f.safetensors"
            )

        return write

    hopper: tuple[dict[str, Any], ...] = (
        {"xml_file": "./pipe.xml"}, {"xml_file": "/dev/zero"}, {"xml_file": "/etc/passwd"},
        {"xml_file": "./bomb.xml"}, {"xml_file": "/"}, {"xml_file": "./x\0y"},
        {"frame_skip": 0}, {"frame_skip": 2**40}, {"reset_noise_scale": 1e308},
        {"xml_file": "\x1b]0;title\x07"}, {"frame_skip": 10**7},
    )  # fmt: skip
    for kwargs in hopper:
        for reader in ("eval", "onnx"):
            slow = "frame_skip" in kwargs
            words = READERS[reader]
            if reader == "eval":
                words = (*words, "--set", "step_deadline_s=2", "--set", "max_retries=0")
            yield Attempt("environment arguments", f"hopper {kwargs} {reader}", words,
                          forge("hopper", kwargs), endless=slow, quick=not slow,
                          limit_s=10.0 if slow else LIMIT_S)  # fmt: skip
    cartpole: tuple[dict[str, Any], ...] = (
        {"id": "x"}, {"self": 1}, {"": 1}, {"disable_env_checker": True}, {"max_episode_steps": -1},
        {"env_id": ["evil:Env-v0"]}, {"x" * 5000: 1}, {"a\x1b[2J": 1}, {"render_mode": "human"},
        {"sutton_barto_reward": "\u202e"}, {"x": nested(100)}, {"x": nested(400)}, {"x": 2**70},
        {"x": 1e999},
    )  # fmt: skip
    for kwargs in cartpole:
        yield Attempt("environment arguments", f"cartpole {list(kwargs)}", EVAL,
                      forge("cartpole", kwargs),
                      quick="max_episode_steps" not in kwargs)  # fmt: skip


def checkpoints() -> Iterator[Attempt]:
    """Yield valid policy files in which one value was changed, with a valid checksum."""
    chance = random.Random(SEED)
    source = Forgery(SHIPPED / "cartpole.safetensors")
    values: tuple[Any, ...] = (
        None, True, -1, 0, 2**31, 2**62, 2**63, 10**400, -1e308, 1e308, "", "\x1b[2J\u202e", "9",
        [], {}, [[]], nested(150), "x" * 100_000, float("nan"), float("inf"),
    )  # fmt: skip
    paths = [
        (string, path) for string in STRINGS for path in leaves(json.loads(source.strings[string]))
    ]

    def changed(string: str, path: str, value: Any) -> Write:
        def write(folder: Path) -> None:
            forgery = Forgery(SHIPPED / "cartpole.safetensors")
            with contextlib.suppress(ValueError, RecursionError):
                forgery.change(string, path, value)
            forgery.write(folder / "f.safetensors")

        return write

    kind = "checkpoints with a valid checksum"
    for number in range(400):
        string, path = chance.choice(paths)
        value, reader = chance.choice(values), chance.choice(("eval", "inspect", "recipe", "json"))
        yield Attempt(kind, f"{string}.{path}={value!r:.20} {reader}",
                      READERS[reader], changed(string, path, value), quick=number < 12,
                      endless=reader == "eval")  # fmt: skip
    for text in ("0", "2", "-1", "1e0", "٣", "9" * 5000, "1\x1b", ""):
        yield Attempt(kind, f"format {text[:9]!r}", READERS["inspect"],
                      write_forged(lambda f, text=text: f.put("format", text)))  # fmt: skip
    for name in ("cartpole", "lunarlander", "pendulum", "hopper"):
        for weight in (3e38, -3e38, 1e-45):
            for reader in ("eval", "onnx"):
                yield Attempt(
                    kind, f"weights {weight} {name} {reader}", READERS[reader],
                    write_forged(lambda f, weight=weight: all_weights(f, weight), name),
                    quick=False,
                )  # fmt: skip


def write_forged(change: Callable[[Forgery], Any], name: str = "cartpole") -> Write:
    def write(folder: Path) -> None:
        forgery = Forgery(SHIPPED / f"{name}.safetensors")
        change(forgery)
        forgery.write(folder / "f.safetensors")

    return write


def all_weights(forgery: Forgery, weight: float) -> None:
    for name, array in forgery.tensors.items():
        forgery.tensors[name] = np.full_like(array, weight)


def damaged() -> Iterator[Attempt]:
    """Yield truncated and modified files without a valid checksum, and special files."""
    chance = random.Random(SEED)
    data = (SHIPPED / "cartpole.safetensors").read_bytes()

    def written(content: bytes) -> Write:
        return lambda folder: void((folder / "f.safetensors").write_bytes(content))

    for number in range(300):
        content = bytearray(data)
        if number % 3 == 0:
            del content[chance.randrange(len(data)) :]
        for _ in range(number % 3):
            if content:
                content[chance.randrange(min(len(content), 6000))] = chance.randrange(256)
        reader = chance.choice(("eval", "inspect", "init"))
        yield Attempt("damaged checkpoints", f"bytes {number} {reader}", READERS[reader],
                      written(bytes(content)), quick=number < 8)  # fmt: skip
    length = struct.pack("<Q", 8)
    for name, content in {
        "pickle": b"\x80\x04cos\nsystem\n", "zip": b"PK\x03\x04" + bytes(30), "empty": b"",
        "negative": b"\xff" * 8 + b"{}", "brackets": struct.pack("<Q", 10**6) + b"{" * 10**6,
        "deep": struct.pack("<Q", 200_001) + b'{"a":' + b"[" * 199_996, "short": length,
        "terminal": b"\x1b]0;title\x07\x1b[2J",
    }.items():  # fmt: skip
        yield Attempt("damaged checkpoints", name, READERS["inspect"], written(content))
    special: dict[str, Write] = {
        "pipe": lambda folder: os.mkfifo(folder / "f.safetensors"),
        "device": lambda folder: (folder / "f.safetensors").symlink_to("/dev/zero"),
        "terminal": lambda folder: (folder / "f.safetensors").symlink_to("/dev/tty"),
        "loop": lambda folder: (folder / "f.safetensors").symlink_to("f.safetensors"),
        "folder": lambda folder: (folder / "f.safetensors").mkdir(),
        "password file": lambda folder: (folder / "f.safetensors").symlink_to("/etc/passwd"),
        "sparse": lambda folder: sparse(folder / "f.safetensors", 1 << 33),
    }
    for name, prepare in special.items():
        for reader in ("eval", "inspect", "export"):
            yield Attempt("special files", f"{name} {reader}", READERS[reader], prepare,
                          quick=reader == "inspect")  # fmt: skip


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def configs() -> Iterator[Attempt]:
    """Yield attempts to train with a config of deep, large or ill-typed TOML."""
    giant = "0x" + "f" * 5000
    texts = {
        "hexadecimal seed": f"[learning]\nseed = {giant}\n",
        "hexadecimal id": f"[learning.environment]\nid = {giant}\n",
        "hexadecimal argument": f"[learning.environment.kwargs]\nx = {giant}\n",
        "hexadecimal unknown": f"x = {giant}\n",
        "decimal steps": f"stop_at_steps = {10**400}\n",
        "digits": f"stop_at_steps = {'9' * 9000}\n",
        "dotted key": "a." * 400_000 + "b = 1\n",
        "dotted quoted key": "'a'." * 200_000 + "b = 1\n",
        "dotted headers": "".join(f"[{'.'.join(['a'] * k)}]\n" for k in range(1, 900)),
        "brackets": "x = " + "[" * 400_000,
        "braces": "x = " + "{a=" * 200_000,
        "quotes": '"' * 900_001,
        "escapes": "x = " + '\\"' * 400_000,
        "unclosed text": 'x = """' + '"\\' * 400_000,
        "too large": "# " + "x" * 2_000_000,
        "date": "[learning.environment.kwargs]\nx = 1979-05-27\n",
        "infinity": "[learning.ppo]\nlearning_rate = inf\n",
        "escape": '[learning.environment]\nid = "\\u001b[2J"\n',
        "escape in a name": '"\\u001b[2J\\u202e" = 1\n',
        "section": "learning = 3\n",
        "algorithm": "[learning]\nalgorithm = {a = 1}\n",
        "memory": "[learning.rollout]\nnum_slots = 100000\nenvs_per_slot = 4096\n"
                  "steps = 10000000\n",
        "network": f"[learning.network]\nhidden = {[65536] * 16}\n",
        "replay": "[learning]\nalgorithm = 'sac'\n[learning.environment]\nid = 'Pendulum-v1'\n"
                  "[learning.sac]\nbuffer_size = 1000000000\n",
        "not text": "\udcff",
    }  # fmt: skip
    for depth in (60, 300, 450, 900):
        texts[f"depth {depth}"] = f"[learning.environment.kwargs]\nx = {'[' * depth}{']' * depth}\n"
    for name, text in texts.items():
        content = text.encode("utf-8", "surrogateescape")
        for words in (("--dry-run",), ("--steps", "64", "--out", "new", "--quiet")):
            yield Attempt("configs", f"{name} {words[0]}", ("train", "--config", "f.toml", *words),
                          lambda folder, content=content: void(
                              (folder / "f.toml").write_bytes(content)),
                          quick=words[0] == "--dry-run")  # fmt: skip
    for setting in ("evaluation.max_episode_steps", "learning.horizon_steps", "stop_at_iterations",
                    "learning.environment.max_episode_steps", "evaluation.every_steps",
                    "learning.policy_average", "runtime.keep_checkpoints"):  # fmt: skip
        table, _, name = setting.rpartition(".")
        text = (f"[{table}]\n" if table else "") + f"{name} = {10**30}\n"
        yield Attempt("configs", f"{setting} of 100 bits",
                      ("train", "--config", "f.toml", "--dry-run"),
                      lambda folder, text=text: void(
                          (folder / "f.toml").write_text(text)))  # fmt: skip


def run_folders(run: Path, replay: Path) -> Iterator[Attempt]:
    """Yield run folders in which one file was changed, linked or replaced."""
    giant = "0x" + "f" * 5000
    config = (run / "config.toml").read_text()
    odd = "<script>alert(1)</script>$\\\\frac{_^ \\u202e\\u001b[2J"
    records = {
        "metrics.jsonl": [
            '{"steps": 1, "eval_return_mean": 1e308}\n', '{"steps": -5}\n', "[" * 5000 + "\n",
            '{"steps": 9223372036854775807, "\\u001b[2J": 1}\n', "\x1b]0;title\x07\n",
            '{"steps": 1' + "0" * 5000 + "}\n",
        ],
        "episodes.csv": ["r,l\n1e308,1\n", "r,l\n,,,\n", '"', "r,l\n\x1b[2J,1\n"],
        "timing.jsonl": ['{"steps": 1, "collect": -1e308}\n', "{}\n"],
        "machines.json": ["[" * 5000, '[{"machine": {"cpu": "\\u001b[2J<script>"}}]', "3"],
        "result.json": ['{"steps": 1e999}', '{"steps": 2048, "evaluation": {"mean": 1e308}}',
                        '{"steps": 2048, "evaluation": {"mean": 1, "low": [], "high": "x"}}'],
        "config.toml": [
            config.replace("seed = 0", f"seed = {giant}"), config + f"\n[zz]\nx = {giant}\n",
            config + "\n[zz]\nx = " + "[" * 450 + "]" * 450 + "\n", "a." * 200_000 + "b = 1\n",
            config.replace("CartPole-v1", odd), config.replace('"ppo"', f'"{odd}"'),
            config.replace("gradient_shards = 1", "gradient_shards = 1979-05-27"), "learning = 3\n",
            config.replace("[runtime.flame]", "[runtime.flame]\nextra_dependencies = ['evil']"),
        ],
    }  # fmt: skip
    commands = (
        ("plot", "run", "-o", "p.png"), ("plot", "run", "-o", "-"), ("runs", "."),
        ("report", "run", "-o", "r.html"), ("inspect", "run"),
        ("resume", "run", "--steps", "4200", "--quiet", "--workers", "1"),
    )  # fmt: skip

    def changed(name: str, write: Write) -> Write:
        def prepare(folder: Path) -> None:
            shutil.copytree(run, folder / "run")
            with contextlib.suppress(FileNotFoundError):
                (folder / "run" / name).unlink()
            write(folder / "run" / name)

        return prepare

    for name, contents in records.items():
        writes: dict[str, Write] = {
            f"text {number}": lambda path, text=text: void(path.write_text(text))
            for number, text in enumerate(contents)
        }
        writes |= {
            "zeros": lambda path: void(path.write_bytes(bytes(1000))),
            "not text": lambda path: void(path.write_bytes(b"\xff" * 1000)),
            "sparse": lambda path: sparse(path, 1 << 33),
            "pipe": lambda path: os.mkfifo(path),
            "device": lambda path: path.symlink_to("/dev/zero"),
            "password file": lambda path: path.symlink_to("/etc/passwd"),
            "folder": lambda path: path.mkdir(),
        }
        for what, write in writes.items():
            for words in commands:
                yield Attempt("run folders", f"{name} {what} {words[0]}", words,
                              changed(name, write),
                              quick=words[0] == "plot" and words[-1] == "-"
                              and what in ("text 0", "pipe", "sparse"))  # fmt: skip
    yield from learner_states(run, replay)


def learner_states(run: Path, replay: Path) -> Iterator[Attempt]:
    """Yield checkpoints with a valid checksum and changed counters or replay buffers."""
    for folder in (run, replay):
        newest = folder / "latest.safetensors"
        for name, array in Forgery(newest).tensors.items():
            if not name.startswith("learner."):
                continue
            kind = np.iinfo if array.dtype.kind in "iu" else np.finfo
            extremes: dict[str, Any] = {"no shape": np.zeros((), array.dtype)}
            if array.dtype.kind != "b":
                bounds = kind(array.dtype)
                extremes |= {
                    "most": np.full(array.shape, bounds.max, array.dtype),
                    "least": np.full(array.shape, bounds.min, array.dtype),
                }
            extremes["empty"] = np.zeros((5, 0), array.dtype)
            for what, extreme in extremes.items():

                def prepare(
                    to: Path, name: str = name, extreme: Any = extreme, folder: Path = folder
                ) -> None:
                    shutil.copytree(folder, to / "run")
                    forged = Forgery(folder / "latest.safetensors").fill(name, extreme)
                    for path in (to / "run").glob("checkpoints/*.safetensors"):
                        path.unlink()
                    forged.write(to / "run" / "checkpoints" / "step-000000001.safetensors")
                    forged.write(to / "run" / "latest.safetensors")

                counter = name.endswith(("count", "tail.rewards")) and what != "empty"
                for words in (
                    ("inspect", "run"),
                    ("resume", "run", "--steps", "4200", "--quiet", "--workers", "1"),
                ):
                    yield Attempt("learner states", f"{name} {what} {words[0]}", words, prepare,
                                  quick=counter and words[0] == "inspect",
                                  endless=True, limit_s=30.0)  # fmt: skip


def leaves(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [path] if path else [""]
    return [leaf for name in value for leaf in leaves(value[name], f"{path}.{name}".lstrip("."))]


def void(value: object) -> None:
    """Discard a value, so that a lambda returns None."""


def run_attempt(attempt: Attempt, folder: Path) -> tuple[str, str]:
    """Run one attempt. Return its outcome and its output."""
    trace = folder / "trace"
    for name in ("evil", *ABSENT):
        (folder / f"{name}.py").write_text(MODULE.format(trace=str(trace)))
    attempt.prepare(folder)
    sys.stdout.flush()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            run_command(attempt.words, folder, output.fileno())
        code, bytes_used, interrupted = wait_for(child, attempt)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    return classify(attempt, code, bytes_used, interrupted, text, trace), text


def run_command(words: tuple[str, ...], folder: Path, output: int) -> None:
    """Run the command in the forked process, as if it had been typed."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.argv = ["rlflame", *words]
        from rlflame.__main__ import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_for(child: int, attempt: Attempt) -> tuple[int | None, int, bool]:
    """Return the exit code (None: a hang), the peak memory, and if SIGINT was sent."""
    interrupted, until = False, time.monotonic() + attempt.limit_s
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            end_group(child)
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, interrupted
        if time.monotonic() > until:
            if interrupted:
                end_group(child)
                _, _, usage = os.wait4(child, 0)
                return None, usage.ru_maxrss * 1024, True
            interrupted, until = True, time.monotonic() + GRACE_S
            os.kill(child, signal.SIGINT)
        time.sleep(0.01)


def end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def classify(
    attempt: Attempt, code: int | None, used: int, interrupted: bool, text: str, trace: Path
) -> str:
    if trace.exists():
        return "CODE RAN"
    if code is None or (interrupted and not attempt.endless):
        return "HANG"
    if used > MEMORY_BYTES or code == -signal.SIGKILL:
        return "MEMORY"
    if "Traceback (most recent" in text or "Internal error in rlflame" in text:
        return "TRACEBACK"
    if code not in (0, 1, 2, 3, 130):
        return "CRASH"
    if CONTROL.search(text):
        return "RAW CONTROL CHARACTER"
    if "root:x:0" in text and "begins b'root:x:0'" not in text:
        return "CONTENT SHOWN"
    return REFUSED if code in (1, 2, 3) else ACCEPTED


def all_attempts(folder: Path) -> Iterator[Attempt]:
    run, replay = folder / "ppo", folder / "sac"
    words = ("--workers", "1", "--quiet", "--set", "evaluation.final_episodes=2")
    train_once(folder, "train", "--env", "cartpole", "--steps", "2048", "--out", str(run), *words)
    train_once(folder, "train", "--env", "pendulum", "--algo", "sac", "--steps", "600",
               "--out", str(replay), *words, "--set", "sac.learning_starts=100",
               "--set", "sac.updates_per_step=0.01")  # fmt: skip
    yield from modules()
    yield from arguments()
    yield from checkpoints()
    yield from damaged()
    yield from configs()
    yield from run_folders(run, replay)


def train_once(folder: Path, *words: str) -> None:
    child = os.fork()
    if child == 0:
        with (folder / "output").open("w") as output:
            run_command(words, folder, output.fileno())
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError((folder / "output").read_text())


def limit_threads() -> None:
    """Limit the threads of BLAS before the first forked command loads it."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")


def import_library() -> None:
    """Import most of what the commands import, so that their forked processes have it."""
    for name in ("api", "cli.app", "experiment.run", "experiment.listings",
                 "analysis.report.build"):  # fmt: skip
        importlib.import_module(f"rlflame.{name}")


@contextlib.contextmanager
def empty_home(folder: Path) -> Iterator[None]:
    """Set an empty home folder, in which no module is trusted."""
    before = {name: os.environ.get(name) for name in ("HOME", "XDG_CONFIG_HOME")}
    os.environ["HOME"] = str(folder / "home")
    os.environ.pop("XDG_CONFIG_HOME", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value


def attack(*, quick: bool, kinds: str = "", verbose: bool = False) -> dict[str, Counter[str]]:
    """Count the outcomes of each class, and print the faults.

    Each process imports everything itself, because files could have the names of modules. With
    `quick`, only the processes of the class that tries such names do so.
    """
    counts: dict[str, Counter[str]] = {}
    limit_threads()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, empty_home(Path(name)):
        for attempt in all_attempts(Path(name)):
            if (quick and not attempt.quick) or not re.search(kinds, attempt.kind):
                continue
            if quick and attempt.kind != "module names":
                import_library()
            folder = Path(tempfile.mkdtemp(dir=name))
            outcome, text = run_attempt(attempt, folder)
            shutil.rmtree(folder, ignore_errors=True)
            counts.setdefault(attempt.kind, Counter())[outcome] += 1
            if outcome not in (REFUSED, ACCEPTED):
                print(
                    f"{outcome}: {attempt.kind}: {attempt.name!r:.120}: {text[-400:]!r}", flush=True
                )
            elif verbose:
                print(f"{outcome}: {attempt.kind}: {attempt.name!r:.120}: {text[:160]!r}")
    return counts


def faults(counts: dict[str, Counter[str]]) -> int:
    return sum(n for count in counts.values() for kind, n in count.items() if kind.isupper())


def table(counts: dict[str, Counter[str]]) -> str:
    lines = [
        "| attack | attempts | refused | accepted, harmless | faults |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, count in counts.items():
        bad = sum(n for outcome, n in count.items() if outcome.isupper())
        lines.append(f"| {kind} | {count.total()} | {count[REFUSED]} | {count[ACCEPTED]} | {bad} |")
    return "\n".join(lines)


def write_docs(block: str) -> None:
    text = GUIDE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    GUIDE.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run a selection of the attempts")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {GUIDE.name}")
    parser.add_argument("--kinds", default="", help="a regular expression that selects classes")
    parser.add_argument("--verbose", action="store_true", help="print every attempt")
    options = parser.parse_args()
    counts = attack(quick=options.quick, kinds=options.kinds, verbose=options.verbose)
    print(block := table(counts))
    if options.docs:
        write_docs(block)
    return 1 if faults(counts) else 0


if __name__ == "__main__":
    ended(main)
