"""Rules for the source: layers, places of libraries, forbidden words.

The tests parse each import statement of the source, including imports inside functions.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rlflame

SOURCE = Path(rlflame.__file__).parent

#: The ten layers, from the lowest to the highest. Each string is a group of packages and modules. A
#: module may import from lower layers and from its own group.
LAYERS = [
    ["errors terminal_text"],
    ["rollout"],
    ["config", "statistics"],
    ["fleet", "learning"],
    ["training"],
    ["storage"],
    ["analysis", "console", "rendering"],
    ["experiment"],
    ["bench"],
    ["api cli __main__"],
]

#: Third-party libraries, and the only modules that may import them.
GUESTS = {
    "torch": {
        "learning.torch_gradients",
        "learning.sac.loss_torch",
        "learning.sac.sac_device",
        "learning.ppo.ppo_device",
        "learning.reinforce.reinforce_device",
        "learning.device.chunks",
        "learning.device.graph",
        "learning.device.observations",
        "learning.device.optim",
        "learning.device.replay",
        "learning.parallel.torch_process_group",
        "experiment.learners.liveness",
    },
    "flamepy": {"fleet.flame.*"},
    "grpc": {"fleet.flame.*"},
    "typer": {"cli.*"},
    "rich": {"console.live"},
    "matplotlib": {"analysis.plots.matplotlib_backend"},
    "tensorboard": {"storage.tracking.tensorboard"},
    "onnx": {"storage.export"},
    "onnxruntime": {"storage.export"},
    "PIL": {"rendering.video"},
    "imageio_ffmpeg": {"rendering.video"},
    "safetensors": {"storage.safetensors_file"},
    "pydantic": {
        "config.evaluation",
        "config.recipe",
        "config.algorithms",
        "config.runtime",
        "config.toml_io",
        "config.validation",
        "experiment.listings",
        "storage.checkpoint",
        "storage.run_reader",
        "storage.safetensors_file",
        "analysis.report.bench_comparison",
    },
    "gymnasium": {
        "rollout.envs.make",
        "rollout.envs.gymnasium_env",
        "rollout.envs.spaces",
        "rollout.envs.vector_env",
        "rollout.mujoco.mujoco_env",
        "experiment.env_failure",
        "bench.sleeping",
    },
    "mujoco": {
        "rollout.mujoco.simulation",
        "rendering.process_main",
        "bench.raw_stepping",
    },
    "cloudpickle": {"fleet.flame.bundle"},
    "pyarrow": {"fleet.flame.object_cache", "fleet.flame.bundle"},
    "numpy": {"*"},
}

#: Modules that each module must not import.
BLIND = {
    "rollout.*": ["rlflame.errors", "logging", "time"],
    "rollout.worker": ["subprocess", "multiprocessing", "random", "datetime"],
    "rollout.rollout": ["subprocess", "multiprocessing", "random", "datetime"],
    "learning.*": ["rlflame.fleet", "gymnasium", "pathlib", "time", "logging", "random"],
    "fleet.*": ["rlflame.learning"],
    "training.trainer": [
        "time",
        "pathlib",
        "os",
        "json",
        "rlflame.fleet.local",
        "rlflame.learning.ppo.ppo",
    ],
    "training.evaluation": ["pathlib", "rlflame.training.trainer", "rlflame.storage.checkpoint"],
    "errors": ["rlflame"],
    "terminal_text": ["rlflame"],
    "storage.*": ["rlflame.console", "rlflame.experiment.run", "rlflame.experiment.components"],
    "analysis.curves": ["rlflame.analysis.plots.matplotlib_backend"],
    "analysis.grouping": ["rlflame.analysis.plots"],
    "experiment.learners.*": [
        "rlflame.fleet",
        "rlflame.fleet.factory",
        "rlflame.storage",
        "rlflame.console",
    ],
    "rendering.clip_recorder": ["PIL"],
    "rendering.policy_render": ["PIL"],
    "console.output": [
        "rlflame.console.base",
        "rlflame.console.run_progress",
        "rlflame.console.run_text",
        "rlflame.training.trainer",
    ],
    "config.recipe": ["rlflame.rollout", "rlflame.learning", "rlflame.fleet"],
    "config.algorithms": [
        "rlflame.config.recipe",
        "rlflame.rollout",
        "rlflame.learning",
        "rlflame.fleet",
    ],
    "config.runtime": [
        "rlflame.config.recipe",
        "rlflame.rollout",
        "rlflame.learning",
        "rlflame.fleet",
    ],
}


#: Concrete fleets and algorithms, and the only modules that may import them.
CONCRETE = {
    "rlflame.fleet.local": {"fleet.factory"},
    "rlflame.fleet.inline": {"fleet.factory"},
    "rlflame.learning.ppo.ppo": {
        "learning.factory",
        "learning.torch_gradients",
        "learning.ppo.ppo_device",
    },
    "rlflame.learning.reinforce.reinforce": {
        "learning.factory",
        "learning.torch_gradients",
        "learning.reinforce.reinforce_device",
    },
    "rlflame.learning.reinforce.reinforce_device": {"learning.factory"},
    "rlflame.learning.sac.sac": {"learning.factory", "learning.sac.sac_device"},
    "rlflame.learning.ppo.ppo_device": {"learning.factory"},
    "rlflame.learning.sac.sac_device": {"learning.factory"},
    "rlflame.learning.torch_gradients": {
        "learning.factory",
        "learning.ppo.ppo_device",
        "learning.reinforce.reinforce_device",
        "learning.sac.sac_device",
        "learning.sac.loss_torch",
        "cli.train",
    },
    "rlflame.learning.sac.loss_torch": {"learning.factory", "learning.sac.sac_device"},
}

#: The module that makes random generators, the module that imports torch but never seeds it, and
#: the module that pickles calls for Flame.
SEEDING, TORCH_NETWORKS, PARCEL = (
    "rollout.seeding",
    "learning.torch_gradients",
    "fleet.flame.bundle",
)

#: The modules that a worker runs, and the package that must contain all of their imports.
WORKER = ["rlflame.rollout.worker", "rlflame.rollout.process.worker_main"]
WORKER_PACKAGE = "rollout"


@cache
def modules() -> dict[str, ast.Module]:
    """All modules, parsed, by name without `rlflame.`."""
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
    """All nodes below a node, or only those that run when the module is imported."""
    for inner in ast.iter_child_nodes(node):
        late = isinstance(inner, ast.FunctionDef) or (
            isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING"
        )
        if not (at_load and late):
            yield inner
            yield from statements(inner, at_load)


def imports(name: str, *, at_load: bool = False) -> Iterator[str]:
    """The full names of a module's imports: a.b if `from a import b` names a module."""
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


def layer_of(name: str) -> tuple[int, str]:
    """The layer and the group of a module."""
    top = name.split(".")[0]
    groups = [
        (layer, group)
        for layer, groups in enumerate(LAYERS)
        for group in groups
        if top in group.split()
    ]
    assert len(groups) == 1, f"{name} belongs to the layers {groups}: give it one in LAYERS"
    return groups[0]


def test_blame_ignores_commits_that_exist() -> None:
    lines = (Path(__file__).parents[1] / ".git-blame-ignore-revs").read_text().splitlines()
    hashes = [line for line in lines if line and not line.startswith("#")]
    assert hashes
    git = ["git", "-C", str(Path(__file__).parents[1])]
    if (
        not (Path(__file__).parents[1] / ".git").exists()
        or subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        == "true"
    ):
        pytest.skip("this copy has no history")
    for number in hashes:
        command = [*git, "merge-base", "--is-ancestor", number, "HEAD"]
        assert subprocess.run(command).returncode == 0, number


def test_the_root_has_six_modules_and_twelve_packages() -> None:
    top = {name.split(".")[0] for name in modules()}
    packages = {name for name in top if is_package(name)}
    assert len(packages) == 12
    assert top - packages == {"__main__", "api", "errors", "statistics", "terminal_text"}


def test_imports_point_down() -> None:
    wrong = []
    for name in modules():
        layer, group = layer_of(name)
        for imported in imports(name):
            if not imported.startswith("rlflame.") or imported == "rlflame.__version__":
                continue
            below, other = layer_of(imported.removeprefix("rlflame."))
            if below > layer or (below == layer and other != group):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def words_of_the_tables() -> dict[str, set[str]]:
    """Each name and pattern in the tables that stands for a module, by table."""
    hidden = {word for words in BLIND.values() for word in words}
    return {
        "LAYERS": {word for groups in LAYERS for group in groups for word in group.split()},
        "GUESTS": {word for places in GUESTS.values() for word in places},
        "BLIND": set(BLIND),
        "hidden in BLIND": {
            word.removeprefix("rlflame.") for word in hidden if word.startswith("rlflame.")
        },
        "CONCRETE": {name.removeprefix("rlflame.") for name in CONCRETE}.union(*CONCRETE.values()),
        "others": {
            *(SEEDING, TORCH_NETWORKS, PARCEL, WORKER_PACKAGE),
            *(name.removeprefix("rlflame.") for name in WORKER),
        },
    }


@pytest.mark.parametrize("table", words_of_the_tables())
def test_every_name_and_pattern_of_the_tables_matches_a_module(table: str) -> None:
    """A rule for a module that does not exist has no effect."""
    words = words_of_the_tables()[table]
    assert words
    assert not [word for word in words if not any(matches(name, word) for name in modules())]


def test_each_place_of_a_third_party_imports_it() -> None:
    """An unused exception would hide a later import."""
    unused = [
        f"{guest} in {pattern}"
        for guest, patterns in GUESTS.items()
        for pattern in patterns
        if not any(
            imported.split(".")[0] == guest
            for name in modules()
            if matches(name, pattern)
            for imported in imports(name)
        )
    ]
    assert not unused


def test_third_parties_in_the_tables_are_known_by_these_names() -> None:
    """The tests would not find a forbidden library with a misspelt name."""
    names = {word for words in BLIND.values() for word in words} | set(GUESTS)
    installed_apart = {"stable_baselines3"}
    others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - installed_apart
    assert not [name for name in others if importlib.util.find_spec(name) is None]


DOTTED = re.compile(r"\brlflame(?:\.[A-Za-z_]\w*)+")


def named_in_texts() -> list[tuple[str, str]]:
    """Find the dotted names of rlflame's modules in a text."""
    return [
        (f"{name}:{node.lineno}", dotted)
        for name, tree in {**modules(), "": ast.parse((SOURCE / "__init__.py").read_text())}.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for dotted in DOTTED.findall(node.value)
    ]


def test_modules_that_texts_name_are_there() -> None:
    """Modules can be named in texts that no import checks, for example after `-m`."""
    named = named_in_texts()
    assert named
    wrong = [
        f"{place} names {dotted}"
        for place, dotted in named
        if dotted.removeprefix("rlflame.") not in modules()
    ]
    assert not wrong


def started_modules() -> set[str]:
    """Modules that are run as `__main__`, by their name in a text."""
    return {
        dotted.removeprefix("rlflame.")
        for _, dotted in named_in_texts()
        if "__main__" in ast.unparse(modules()[dotted.removeprefix("rlflame.")])
    }


def test_modules_with_a_main_part_are_started_by_somebody() -> None:
    """Renaming a module must not leave a main part that nothing starts."""
    with_main = {
        name
        for name, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    }
    assert with_main
    assert with_main - {"__main__"} <= started_modules()


def find_circles(*, at_load: bool) -> set[str]:
    """Find circular imports."""
    edges = {
        name: {imported.removeprefix("rlflame.") for imported in imports(name, at_load=at_load)}
        for name in modules()
    }
    while free := {
        name
        for name, below in edges.items()
        if not below & edges.keys() or not any(name in other for other in edges.values())
    }:
        for name in free:
            del edges[name]
    return set(edges)


#: Interfaces with functions that make their implementations, and these implementations.
LATE_CIRCLES = {
    *("console.display", "console.json_lines", "console.live", "console.plain"),
    *("rollout.envs.vector_env", "rollout.envs.gymnasium_env", "rollout.mujoco.mujoco_env"),
    "rollout.envs.episode_comparison",
}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert not find_circles(at_load=True)
    # The modules on the path between the two circles are part of the circle.
    bridge = {"console.run_text", "fleet.factory", "fleet.inline", "rollout.rollout"}
    assert find_circles(at_load=False) - bridge - {"rollout.worker"} == LATE_CIRCLES


def test_packages_hold_nothing_but_a_docstring() -> None:
    """Code in an `__init__` would run for each import below it."""
    wrong = [name for name, tree in modules().items() if is_package(name) and len(tree.body) > 1]
    assert not wrong
    root = ast.parse((SOURCE / "__init__.py").read_text()).body
    assert [ast.unparse(node).split()[0] for node in root[1:]] == ["__version__"]
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_worker_s_room_imports_numpy_gymnasium_and_nothing_else_of_ours() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "gymnasium", "mujoco"}
    for name in modules():
        if name == WORKER_PACKAGE or name.startswith(f"{WORKER_PACKAGE}."):
            for imported in imports(name):
                ours = imported.startswith(f"rlflame.{WORKER_PACKAGE}")
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
    wrong = [
        f"{name} imports {imported}"
        for name in modules()
        for imported in imports(name)
        if imported in CONCRETE and name not in CONCRETE[imported]
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


@pytest.mark.parametrize("module", WORKER)
def test_a_worker_needs_none_of_the_heavy_libraries(module: str) -> None:
    ours = [f"rlflame.{name}" for name in modules() if not name.startswith(WORKER_PACKAGE)]
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
    """For identifiers only; a text may say done, for example of a fleet's event."""
    wrong = [
        f"{name}:{line} {word}"
        for name, tree in modules().items()
        for word, line in identifiers(tree)
        if re.fullmatch(r"(is_|was_|not_|episode_|ep_)?dones?(_\w+)?", word.lower())
    ]
    assert not wrong


def test_no_random_numbers_but_keyed_ones() -> None:
    """No module makes a generator or uses the global one."""
    wrong = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random":
                keyed = {"Generator"}
                if name == SEEDING:
                    keyed |= {"SeedSequence", "Philox", "PCG64"}
                if name == "rollout.envs.gymnasium_env":  # detects that an environment draws
                    keyed |= {"get_state"}
                if node.attr not in keyed:
                    wrong.append(f"{name}:{node.lineno} np.random.{node.attr}")
        wrong += [f"{name} imports random" for imported in imports(name) if imported == "random"]
        if name == TORCH_NETWORKS:
            for word, line in identifiers(tree):
                if word in ("manual_seed", "rand", "randn", "randperm"):
                    wrong.append(f"{name}:{line} {word}")
    assert not wrong


def test_nothing_is_ever_unpickled() -> None:
    for name in modules():
        found = {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(imports(name))
        # Flame requires pickled calls. Results are bytes, which are never unpickled.
        assert found <= ({"cloudpickle"} if name == PARCEL else set()), name
        assert "pickle.load" not in ast.unparse(modules()[name]), name


def test_files_say_what_they_are_for() -> None:
    for name, tree in modules().items():
        assert ast.get_docstring(tree), f"{name} has no docstring"


#: The modules that may write to a stream directly, and the reason.
PRINTERS = {
    "console.output": "prints, and escapes control characters",
    "console.live": "makes the console of the live display, which escapes text too",
    "rollout.process.worker_process": "relays a worker's output to sys.stderr, which escapes it",
    "experiment.learners.learner_main": "a child process, whose output its parent relays or keeps",
}


def writes_to_a_stream(node: ast.AST) -> bool:
    """Whether a call writes to a stream: print(), sys.stdout.write(), Console()."""
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
        "from rlflame.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'rich', 'torch', 'numpy'}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_settings_are_checked_without_numpy() -> None:
    code = "import sys, rlflame.experiment.preflight; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


#: Names that only the folders and tables of algorithms and fleets may compare or look up.
NAMED_IN = {
    "ppo": {"learning.ppo.*", "learning.factory", "config.algorithms", "config.flags"},
    "reinforce": {"learning.reinforce.*", "learning.factory", "config.algorithms"},
    "sac": {"learning.sac.*", "learning.factory", "config.algorithms"},
    "flame": {"fleet.flame.*", "fleet.factory", "config.runtime"},
}
#: Modules that name them elsewhere.
NAME_EXCEPTIONS = {
    "bench.case": "the hint names the algorithm that collects episodes",
    "cli.bench": "the fleets to compare, and the settings of a large update",
    "config.validation": "the hint shows a setting",
    "learning.normalization": "the hint names the setting of one algorithm",
}


def docstrings(tree: ast.Module) -> set[ast.AST]:
    return {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


def is_named(name: str, text: str) -> bool:
    """Whether a string is a name, or names an option's value or a setting to type."""
    return text == name or bool(
        re.search(rf"--(algo|fleet) {name}\b|(?<![.\w]){name}\.[a-z]", text)
    )


def named_in_code(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Find the algorithms and fleets that code names as strings or recipe sections."""
    texts = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            yield from ((name, node.lineno) for name in NAMED_IN if is_named(name, node.value))
        elif isinstance(node, ast.Attribute) and node.attr in NAMED_IN.keys() - {"flame"}:
            yield node.attr, node.lineno


def test_no_other_code_names_an_algorithm_or_a_fleet() -> None:
    """Other code must use the traits in the tables of algorithms and fleets."""
    places = [
        (module, name, line)
        for module, tree in modules().items()
        for name, line in named_in_code(tree)
        if not any(matches(module, pattern) for pattern in NAMED_IN[name])
    ]
    excepted = {
        pattern
        for module, _, _ in places
        for pattern in NAME_EXCEPTIONS
        if matches(module, pattern)
    }
    assert not [
        f"{module}:{line} names {name}"
        for module, name, line in places
        if not any(matches(module, pattern) for pattern in NAME_EXCEPTIONS)
    ]
    assert excepted == NAME_EXCEPTIONS.keys()
    assert len(NAME_EXCEPTIONS) <= 10


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('if algorithm == "sac": pass', ["sac"]),
        ('{"ppo": 1, "other": 2}', ["ppo"]),
        ("if learning.reinforce is not None: pass", ["reinforce"]),
        ('def f():\n    "flame"', []),
        ('help = "ppo, reinforce or sac"', []),
        ('hint = "use --algo ppo, or set sac.tau=1"', ["ppo", "sac"]),
    ],
)
def test_the_search_for_names_sees_code_and_no_texts(code: str, names: list[str]) -> None:
    assert [name for name, _ in named_in_code(ast.parse(code))] == names


def test_every_algorithm_has_a_row_in_each_table() -> None:
    from typing import get_args

    from rlflame.config.algorithms import TRAITS, AlgorithmName, AlgorithmSections
    from rlflame.config.flags import ALGORITHM_NAMES
    from rlflame.config.runtime import RuntimeSettings
    from rlflame.fleet.factory import FLEETS
    from rlflame.learning.factory import ALGORITHMS

    names = set(get_args(AlgorithmName))
    assert sorted(names) == ALGORITHM_NAMES
    assert names == TRAITS.keys() == ALGORITHMS.keys() == AlgorithmSections.model_fields.keys()
    fleets = get_args(RuntimeSettings.model_fields["fleet"].annotation)
    assert set(fleets) - {"auto"} == FLEETS.keys()


LONGEST_FUNCTION, MOST_PARAMETERS, LONGEST_MODULE = 60, 8, 400


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def list_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    return [*positional, *arguments.kwonlyargs]


@cache
def list_commands() -> set[tuple[str, str]]:
    """The modules and names of the functions that Typer runs as commands."""
    from rlflame.cli.app import app

    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    callbacks = [
        inspect.unwrap(command.callback)
        for group in groups
        if group is not None
        for command in group.registered_commands
        if command.callback is not None
    ]
    return {(call.__module__.removeprefix("rlflame."), call.__name__) for call in callbacks}


def is_command(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a Typer command, with a parameter for each option."""
    return (module, node.name) in list_commands()


def test_modules_and_functions_are_short() -> None:
    long_modules = [
        module
        for module in modules()
        if (path := SOURCE / (module.replace(".", "/") + ".py")).exists()
        and len(path.read_text().splitlines()) > LONGEST_MODULE
    ]
    long_functions = [
        f"{module}.{node.name}"
        for module, tree in modules().items()
        for node in functions(tree)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]
    assert not long_modules
    assert not long_functions


def test_functions_have_few_parameters() -> None:
    assert [
        f"{module}.{node.name}"
        for module, tree in modules().items()
        for node in functions(tree)
        if len(list_parameters(node)) > MOST_PARAMETERS and not is_command(module, node)
    ] == []


def list_kept_calls(owner: ast.ClassDef) -> Iterator[ast.Call]:
    """The calls whose result an instance keeps as an attribute."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target).startswith("self.") for target in targets):
                yield from (call for call in ast.walk(node.value) if isinstance(call, ast.Call))


def passed_methods(owner: ast.ClassDef, names: set[str]) -> Iterator[str]:
    """The methods of a class that it passes to the constructors of its attributes."""
    methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    for call in list_kept_calls(owner):
        if isinstance(call.func, ast.Name) and call.func.id in names:
            for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
                for node in [value.body] if isinstance(value, ast.Lambda) else [value]:
                    inner = node.func if isinstance(node, ast.Call) else node
                    if not isinstance(inner, ast.Attribute) or inner.attr not in methods:
                        continue
                    if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                        yield inner.attr


#: Classes that may pass a method to an attribute, and the reason.
CALLBACKS = {
    "SignalStop": "a signal handler is a function",
    "BenchSession": "a fleet's observer is a function",
}


def test_constructors_take_no_callbacks_into_their_creator() -> None:
    classes = [
        node
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = {node.name for node in classes}
    found = {node.name for node in classes if any(passed_methods(node, names))}
    assert found == CALLBACKS.keys()


def test_the_search_for_callbacks_sees_them() -> None:
    code = """
class A:
    def __init__(self):
        self.b = B(self.f, 1)
        self.c = B(lambda: self.g())
        self.d = other(self.f)
    def __enter__(self):
        self.e = B(self.f)
    def submit(self):
        return B(self.f)
    def f(self): ...
    def g(self): ...
"""
    (owner,) = ast.parse(code).body
    assert isinstance(owner, ast.ClassDef)
    assert [*passed_methods(owner, {"B"})] == ["f", "g", "f"]


#: Folders of tests without a package in the source, and tests of the whole project.
OTHER_TESTS = {"benchmarks", "docs", "flame_stub"}
PROJECT_TESTS = {
    *("test_architecture", "test_names", "test_golden", "test_hostile", "test_wheel"),
    *("test_compose", "test_shipped_policies"),
}


def find_subject(test: Path) -> str | None:
    """Find the module of a test file: `test_<module>` or `test_<module>_<aspect>`.

    In tests/cli, `test_cli_plot` belongs to cli/plot.py, because names of test files are unique.
    """
    folder = test.parent
    names = [test.stem.removeprefix("test_")]
    names += [names[0].removeprefix(f"{folder.name}_")] if folder.name else []
    places = {".".join([*folder.parts, path.stem]) for path in (SOURCE / folder).glob("*.py")}
    for name in names:
        words = name.split("_")
        for end in range(len(words), 0, -1):
            if (module := ".".join([*folder.parts, "_".join(words[:end])])) in places:
                return module
    return None


def test_tests_mirror_the_source() -> None:
    tests = Path(__file__).parent
    files = sorted(path.relative_to(tests) for path in tests.rglob("test_*.py"))
    assert len({file.name for file in files}) == len(files)
    assert not [
        str(file)
        for file in files
        if file.parts[0] not in OTHER_TESTS
        and file.stem not in PROJECT_TESTS
        and find_subject(file) is None
    ]
    assert {file.stem for file in files if len(file.parts) == 1} >= PROJECT_TESTS
    assert {file.parts[0] for file in files} >= OTHER_TESTS


@pytest.mark.parametrize(
    ("test", "subject"),
    [
        ("fleet/flame/test_client_errors.py", "fleet.flame.client"),
        ("cli/test_cli_plot.py", "cli.plot"),
        ("console/test_client.py", None),
        ("test_errors.py", "errors"),
    ],
)
def test_the_search_for_subjects_sees_the_folder(test: str, subject: str | None) -> None:
    assert find_subject(Path(test)) == subject
