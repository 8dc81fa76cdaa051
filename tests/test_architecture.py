"""Walls: who may import whom, who may import what, and words that are not to be used.

Every import statement in the source is parsed, wherever it stands. A new module has to be given
its floor here before anything may import it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rlflame

SOURCE = Path(rlflame.__file__).parent

#: From the ground up. A module imports from lower floors, and from its own room: the modules of
#: one package, or names that stand in one string together.
FLOORS = [
    ["errors", "escapes", "rollout rollout.*"],
    ["regular_file"],
    [
        "toml",
        "config methods runtime",
        "metrics",
        "fleet",
        "learner",
        "trust",
        "machine",
        "tables",
    ],
    ["env_file"],
    ["estimates"],
    ["seeds", "display", "files", "history", "crew", "filming"],
    [
        "crew.torchrun",
        "crew.roll_call",
        "crew.shared_file",
        "graphics",
        "memory",
        "onnx_file",
        "event_file",
        "line",
    ],
    ["fleet.*", "learner.*", "presets", "plot plot.*", "evaluate", "history.recorded decoded"],
    ["trainer", "facts", "learners"],
    ["history.grouping", "history.averaged", "tensorboard", "companion companion.*"],
    ["history.curves"],
    ["report report.*"],
    ["files.*", "stop"],
    ["render render.*"],
    ["display.show", "scoring", "inspection", "doctor doctor.*"],
    ["display.*"],
    ["environments"],
    ["build"],
    ["early"],
    ["fleets", "settings", "crew.processes", "catalogue", "filming.*", "export", "onward"],
    ["running", "runs", "crew.follower"],
    ["seeds.*"],
    ["api", "bench bench.*"],
    ["commands commands.*"],
    ["cli"],
    ["__main__"],
]

#: Third parties, and the only places that know them.
GUESTS = {
    "torch": {
        "learner.networks",
        "learner.torch_sac",
        "learner.torch_group",
        "learner.leaves",
        "crew.roll_call",
    },
    "flamepy": {"fleet.flame.*"},
    "typer": {"cli", "commands", "commands.*"},
    "rich": {"display.console", "display.live", "seeds.live"},
    "matplotlib": {"plot.picture"},
    "onnx": {"onnx_file"},
    "onnxruntime": {"onnx_file"},
    "PIL": {"render.panels", "render.files", "render.film"},
    "imageio_ffmpeg": {"render.files"},
    "safetensors": {"files.tensor_file"},
    "pydantic": {
        "config",
        "methods",
        "runtime",
        "toml",
        "presets",
        "catalogue",
        "files.checkpoint",
    },
    "gymnasium": {
        "rollout.making",
        "rollout.gymnasium_row",
        "rollout.env_factory",
        "rollout.mujoco",
        "rollout.v5_known",
        "environments",
        "bench.shipped.sleeping",
        "bench.stable",
    },
    "stable_baselines3": {"bench.stable"},
    "mujoco": {"rollout.gymnasium_row", "rollout.bodies", "bench.bare"},
    "cloudpickle": {"fleet.flame.parcel"},
    "pyarrow": {"fleet.flame.raw_object", "fleet.flame.loader"},
    "numpy": {"*"},
}

#: What a room must not know, from its own docstring.
BLIND = {
    "rollout.*": ["rlflame.errors", "logging", "time"],
    "rollout.worker": ["subprocess", "multiprocessing", "random", "datetime"],
    "rollout.loop": ["subprocess", "multiprocessing", "random", "datetime"],
    "learner.*": ["rlflame.fleet", "gymnasium", "pathlib", "os", "time", "logging", "random"],
    "fleet.*": ["rlflame.learner", "pathlib", "logging"],
    "trainer": ["time", "pathlib", "os", "json", "rlflame.fleet.local", "rlflame.learner.ppo"],
    "evaluate": ["pathlib", "rlflame.trainer", "rlflame.files.checkpoint"],
    "errors": ["rlflame"],
    "escapes": ["rlflame"],
    "files.*": ["rlflame.display", "rlflame.running", "rlflame.build"],
    "history.*": ["rlflame.plot.picture", "rlflame.plot.terminal", "rlflame.plot.inline"],
    "crew.*": ["rlflame.fleet", "rlflame.fleets", "rlflame.files", "rlflame.display"],
    "filming.*": ["typer", "rlflame.commands", "PIL"],
    "display.mouth": ["rlflame.display.show", "rlflame.display.board", "rlflame.trainer"],
    "display.layout": ["rlflame.display.words", "rlflame.display.board"],
    "config": ["rlflame.rollout", "rlflame.learner", "rlflame.fleet"],
    "methods": ["rlflame.config", "rlflame.rollout", "rlflame.learner", "rlflame.fleet"],
    "runtime": ["rlflame.config", "rlflame.rollout", "rlflame.learner", "rlflame.fleet"],
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module without its `rlflame.`, parsed."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): (
            ast.parse(path.read_text())
        )
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "__init__.py"
    }


def is_package(name: str) -> bool:
    return (SOURCE / Path(*name.split("."), "__init__.py")).exists()


def statements(node: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    """Every node below; or those that run when the module is loaded."""
    for inner in ast.iter_child_nodes(node):
        late = isinstance(inner, ast.FunctionDef) or (
            isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING"
        )
        if not (at_load and late):
            yield inner
            yield from statements(inner, at_load)


def imports(name: str, *, at_load: bool = False) -> Iterator[str]:
    """The full names of what a module imports; `from a import b` is a.b where that is a module."""
    room = name if is_package(name) else name.rpartition(".")[0]
    for node in statements(modules()[name], at_load):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["rlflame", *filter(None, room.split("."))]
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("rlflame.")
                yield f"rlflame.{inner}" if inner in modules() else base


def matches(name: str, pattern: str) -> bool:
    if pattern.endswith(".*"):
        return name.startswith(pattern[:-1])
    return pattern in ("*", name)


def place(name: str) -> tuple[int, str]:
    """Floor and room of a module; an exact name counts for more than a pattern."""
    found = [
        (not any(pattern == name for pattern in room.split()), floor, room)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if any(matches(name, pattern) for pattern in room.split())
    ]
    assert found, f"{name} has no floor yet: give it one in FLOORS"
    _, floor, room = min(found)
    return floor, room


def test_imports_point_down() -> None:
    wrong = []
    for name in modules():
        floor, room = place(name)
        for imported in imports(name):
            if not imported.startswith("rlflame.") or imported == "rlflame.__version__":
                continue
            below, other = place(imported.removeprefix("rlflame."))
            if below > floor or (below == floor and other != room):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_the_plan_has_no_rooms_that_nobody_built() -> None:
    """Patterns aside, and those that the plan leaves for later."""
    later = {"fleet.flame", "rollout.mujoco"}
    named = {word for floor in FLOORS for room in floor for word in room.split()}
    named |= {word for places in GUESTS.values() for word in places} | set(BLIND)
    assert {word for word in named if "*" not in word} - later <= set(modules())


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """When they are loaded; an import inside a function may close a circle."""
    edges = {
        name: {imported.removeprefix("rlflame.") for imported in imports(name, at_load=True)}
        for name in modules()
    }
    while free := {name for name, below in edges.items() if not below & edges.keys()}:
        for name in free:
            del edges[name]
    assert not edges


@pytest.mark.parametrize(
    "package",
    [
        "rollout",
        "fleet",
        "learner",
        "plot",
        "report",
        "bench",
        "display",
        "files",
        "history",
        "crew",
        "filming",
        "seeds",
    ],
)
def test_a_contract_imports_none_of_its_own_rooms(package: str) -> None:
    assert is_package(package)
    inside = f"rlflame.{package}."
    assert not [name for name in imports(package) if name.startswith(inside)]


def test_the_worker_s_room_imports_numpy_gymnasium_and_nothing_else_of_ours() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "gymnasium", "mujoco"}
    for name in modules():
        if name == "rollout" or name.startswith("rollout."):
            for imported in imports(name):
                ours = imported.startswith("rlflame.rollout")
                assert ours or imported.split(".")[0] in allowed, f"{name} imports {imported}"


def test_third_parties_are_known_in_few_places() -> None:
    wrong = []
    for name in modules():
        for imported in imports(name):
            top = imported.split(".")[0]
            if top == "rlflame" or top in sys.stdlib_module_names:
                continue
            if not any(matches(name, pattern) for pattern in GUESTS.get(top, ())):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_rooms_are_blind_to_what_they_must_not_know() -> None:
    wrong = [
        f"{name} imports {imported}"
        for pattern, hidden in BLIND.items()
        for name in modules()
        if matches(name, pattern)
        for imported in imports(name)
        if any(imported == module or imported.startswith(f"{module}.") for module in hidden)
    ]
    assert not wrong


def test_fleets_and_algorithms_are_named_by_those_who_choose_them_alone() -> None:
    concrete = {
        "rlflame.fleet.local": {"fleets"},
        "rlflame.fleet.inline": {"fleets"},
        "rlflame.learner.ppo": {"learners", "learner.networks"},
        "rlflame.learner.reinforce": {"learners", "learner.networks"},
        "rlflame.learner.sac": {"learners"},
        "rlflame.learner.networks": {"learners"},
        "rlflame.learner.torch_sac": {"learners"},
    }
    wrong = [
        f"{name} imports {imported}"
        for name in modules()
        for imported in imports(name)
        if imported in concrete and name not in concrete[imported]
    ]
    assert not wrong


HEAVY = ["torch", "pydantic", "rich", "typer", "flamepy", "safetensors", "matplotlib"]
FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is forbidden here")
sys.meta_path.insert(0, Forbid())
import {module}
"""


@pytest.mark.parametrize("module", ["rlflame.rollout.worker", "rlflame.rollout.child"])
def test_a_worker_needs_none_of_the_heavy_libraries(module: str) -> None:
    ours = [f"rlflame.{name}" for name in modules() if not name.startswith("rollout")]
    code = FORBID.format(names=HEAVY, module=module)
    code += f"\nassert not set(sys.modules) & set({ours!r})\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys; import rlflame; print([m for m in sys.modules if m.startswith('rlflame.')])"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or "", node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_an_end_is_a_termination_or_a_truncation_and_never_just_done() -> None:
    """As an identifier; as a word it may name a fleet's event."""
    wrong = [
        f"{name}:{line} {word}"
        for name, tree in modules().items()
        for word, line in identifiers(tree)
        if re.fullmatch(r"(is_|was_|not_|episode_|ep_)?dones?(_\w+)?", word.lower())
    ]
    assert not wrong


def test_no_random_numbers_but_keyed_ones() -> None:
    """Nobody makes a generator of their own, and nobody touches a global one."""
    wrong = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random":
                keyed = {"Generator"}
                if name == "rollout.seeding":
                    keyed |= {"SeedSequence", "Philox", "PCG64"}
                if node.attr not in keyed:
                    wrong.append(f"{name}:{node.lineno} np.random.{node.attr}")
        wrong += [f"{name} imports random" for imported in imports(name) if imported == "random"]
        if name == "learner.networks":
            for word, line in identifiers(tree):
                if word in ("manual_seed", "rand", "randn", "randperm"):
                    wrong.append(f"{name}:{line} {word}")
    assert not wrong


def test_nothing_is_ever_unpickled() -> None:
    for name in modules():
        found = {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(imports(name))
        # Flame takes calls as pickles; what comes back is bytes of ours, and never loaded as one.
        assert found <= ({"cloudpickle"} if name == "fleet.flame.parcel" else set()), name
        assert "pickle.load" not in ast.unparse(modules()[name]), name


def test_files_say_what_they_are_for() -> None:
    for name, tree in modules().items():
        assert ast.get_docstring(tree), f"{name} has no docstring"


#: The modules that may write to a stream themselves, and why.
PRINTERS = {
    "display.mouth": "prints, and escapes control characters",
    "display.console": "makes the console of the live displays, which escapes them too",
    "rollout.process": "relays a worker's output to sys.stderr, which the command line escapes",
    "crew.follower": "a child process, whose output its parent relays or keeps",
    "bench.stable": "a child process, whose output its parent reads",
}


def writes_to_a_stream(node: ast.AST) -> bool:
    """A call such as print(), typer.echo(), sys.stdout.write(), print_exc() or Console()."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return called in ("print", "pprint", "pprint.pprint", "warnings.warn") or bool(
        re.fullmatch(
            r"(typer|click)\.(echo|secho|echo_via_pager)|(\w+\.)*\w*Console|rich\.print"
            r"|sys\.(__)?(stdout|stderr)(__)?\.(buffer\.)?(write|writelines)"
            r"|traceback\.print_\w+|(logging|logger)\.(debug|info|warning|error|exception)",
            called,
        )
    )


def test_all_output_goes_through_the_module_that_escapes_it() -> None:
    printers = {
        name for name, tree in modules().items() if any(map(writes_to_a_stream, ast.walk(tree)))
    }
    assert printers == set(PRINTERS)


@pytest.mark.parametrize(
    "statement",
    ["print(1)", "typer.echo(1)", "sys.stderr.write('')", "Console(file=x)", "logging.warning('')"],
)
def test_the_search_for_output_sees_it(statement: str) -> None:
    assert any(map(writes_to_a_stream, ast.walk(ast.parse(statement))))


def test_help_loads_no_rich() -> None:
    code = (
        "import sys; sys.argv = ['rlflame', '--help']\n"
        "from rlflame.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'rich', 'torch', 'numpy'}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
