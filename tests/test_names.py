# ruff: noqa: SIM905
"""Rules for names: nouns for modules and classes, verbs for functions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

import rlflame

SOURCE = Path(rlflame.__file__).parent

#: Words that say nothing about a value. An identifier must not consist of one of them.
EMPTY_WORDS = set(
    """
    found told tell tells said say says given gave wanted drawn worded one ones theirs mine ours
    here there those these whoever nobody somebody heard hear spoken speak lent gathered composed
    listed fitted shown recorded learned filled raced met kept taken took begun began asked known
    whole them others beside ahead away later own what who that this it became
    """.split()
)
#: Irregular participles and adverbs. An identifier must not consist of one of them.
IRREGULAR = set(
    """
    above absent abandoned again alike along apart back behind below beyond bought brought built
    caught chosen cut done due drawn each earlier either ended even every everything forgotten
    fought grown held hung inside instead into laid least led left lent lost made meanwhile
    more most moved nothing once out outside paid seen sent several shut slept sold spent spread
    still stood stuck sung swept thrown thus too torn twice under understood until up very whole
    within won worn wound written yet
    """.split()
)
#: Technical terms that are allowed although they are participles or in the lists above.
FIELD_WORDS = set(
    """
    cancelled closed elapsed expected failed normalised out spread succeed succeeded terminated
    truncated
    """.split()
)
#: Nouns and verbs that end like participles or adverbs.
HARMLESS = {"seed", "speed", "family", "apply", "reply", "multiply"}
#: Words that must not be a part of an identifier.
BANNED_PARTS = {"found", "told", "said", "theirs", "mine", "whoever", "somebody", "nobody"}
#: The allowed first words of functions and methods. Only add verbs.
VERBS = set(
    """
    abort accumulate acquire act adapt add allow announce answer append apply ask assemble
    await backward broadcast build call can cancel capture check choose classify clean clip
    close collect commit compare compute concatenate conclude connect copy count create decode
    defer delete deliver describe diagnose die discard dispatch dispose divide draw drop dump encode
    enlarge ensure escape estimate evaluate exchange exclude exit explain extend extract fail
    fetch fill find finish fit flatten flush forget format forward gather generate get give
    greet group guard halve handle has hash ignore import init inspect interrupt invert is
    iterate join keep kill learn limit link list listen load locate loop make mark measure merge
    mix move multiply mute normalise note notify number observe offer open overwrite pack parse
    partition pin ping play poll preload prepare print probe prune put quote read receive record
    refresh refuse register release remove render repeat replace report request requeue resample
    reset resize resolve restore resume rewind round run sample save scale score seal select
    send separate serve set settle share shorten show silence slice smooth snapshot sort speculate
    split standardise start step stop store submit suggest sum summarise sync take terminate
    tidy time track train trim truncate unpack unwrap update upload use validate verify view
    wait wake walk warm watch wrap write
    """.split()
)
#: Function names without a verb: conversions, formulas, and names that other libraries require.
CONVERSIONS = ("as_", "to_", "from_", "of_")
FORMULAS = {
    *("log_prob", "log_variance", "log_slope_of_tanh", "mode", "explained_variance"),
    *("on_session_enter", "on_session_leave", "reducer_override", "writelines", "fileno"),
}
#: At most ten identifiers that may break a rule, with the reason.
EXEMPTIONS = {
    "others": "a field of benchmark results, which are files",
    "retried": "a field of benchmark results, which are files",
    "reached": "a counter in checkpoints, which are files",
    "absent": "a key of the document that `inspect --json` prints",
    "passed": "a key of the document that `eval --json` prints",
}


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


def words_of(name: str) -> list[str]:
    """Split an identifier in snake_case or CamelCase into words."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("_"))
    return [word for word in split.lower().split("_") if word]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that the source binds, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield file, node


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods, except properties and special methods."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not is_function or node.name.startswith("__"):
                continue
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if decorators & {"property", "cached_property", "functools.cached_property"}:
                continue
            if any(
                decorator.endswith((".setter", ".group", "validator")) for decorator in decorators
            ):
                continue
            yield file, node


def is_empty(name: str) -> bool:
    """Whether a name is a pronoun, a participle, an adverb or a verb of speech."""
    word = name.strip("_").lower()
    if word in FIELD_WORDS | HARMLESS:
        return False
    is_participle = len(words_of(name)) == 1 and word.endswith(("ed", "ly"))
    return (
        is_participle or word in EMPTY_WORDS | IRREGULAR or bool(BANNED_PARTS & set(words_of(name)))
    )


def test_identifiers_are_no_empty_words() -> None:
    wrong = [
        f"{file}:{line} {name}"
        for file, tree in trees().items()
        for name, line in identifiers(tree)
        if name not in EXEMPTIONS and is_empty(name)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        *(("found", True), ("_dropped", True), ("quickly", True), ("sent", True)),
        *(("told_name", True), ("seed", False), ("terminated", False), ("dropped_count", False)),
    ],
)
def test_the_search_knows_participles_and_adverbs(name: str, empty: bool) -> None:
    assert is_empty(name) == empty


def test_functions_begin_with_a_verb() -> None:
    wrong = [
        f"{file}:{node.lineno} {node.name}"
        for file, node in functions()
        if not is_command(file, node)
        and node.name not in FORMULAS | EXEMPTIONS.keys()
        and not node.name.strip("_").startswith(CONVERSIONS)
        and words_of(node.name)[:1] != ["main"]
        and not VERBS & set(words_of(node.name)[:1])
    ]
    assert not wrong


def is_command(file: str, node: ast.FunctionDef) -> bool:
    """Whether a function implements a command of the command line."""
    return file.startswith("cli/") and node.name in {Path(file).stem, "evaluate"} | COMMANDS


#: Commands that share a module with other commands.
COMMANDS = {
    *("config", "envs", "runs", "resume", "rollouts", "scaling", "learners", "replay"),
    *("add", "remove", "show"),
}


def test_no_two_public_classes_have_the_same_name() -> None:
    counts = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    assert not [name for name, count in counts.items() if count > 1]


def is_noun(name: str) -> bool:
    """Whether a name's last word is not a verb, participle, adjective or adverb."""
    last = words_of(name)[-1]
    return not (is_empty(last) or last in ADJECTIVES or (last in VERBS and last not in NOUNS))


def test_classes_are_nouns() -> None:
    assert not [
        f"{file}:{node.lineno} {node.name}" for file, node in classes() if not is_noun(node.name)
    ]


#: Last words that are not nouns.
ADJECTIVES = {"away", "alone", "apart", "together", "silent", "half", "leading", "again", "overdue"}
#: Verbs that are also nouns.
NOUNS = set(
    """
    call check get group guard handle interrupt load probe record render report request run slice
    resume snapshot split start stop store view
    """.split()
)


def folders() -> dict[Path, list[str]]:
    """The modules and packages of each folder."""
    names: dict[Path, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.parent.name if path.stem == "__init__" else path.stem
        folder = path.parent.parent if path.stem == "__init__" else path.parent
        if folder != SOURCE.parent and not name.startswith("__"):
            names.setdefault(folder, []).append(name)
    return names


def test_no_two_modules_of_a_folder_differ_by_a_suffix() -> None:
    wrong = [
        f"{folder.name}: {short}, {short}{suffix}"
        for folder, names in folders().items()
        for short in names
        for suffix in ("", "s", "es", "d", "ed", "er", "r", "ing", "ning")
        if (names.count(short) > 1 if not suffix else f"{short}{suffix}" in names)
    ]
    assert not wrong


def test_modules_are_nouns() -> None:
    wrong = [
        f"{folder.name}/{name}"
        for folder, names in folders().items()
        for name in names
        if folder.name != "cli" and not is_noun(name) and not has_function(folder / f"{name}.py")
    ]
    assert not wrong


def has_function(path: Path) -> bool:
    """Whether a module is named after a function's verb, as make.py by `make_env`."""
    tree = trees().get(str(path.relative_to(SOURCE)), ast.Module([], []))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return any(words_of(name)[0] == path.stem for name in names)


def test_modules_of_the_command_line_are_named_after_commands() -> None:
    from rlflame.cli.app import COMMANDS, app

    commands = {name.replace("-", "_") for name in COMMANDS}
    commands |= {group.name for group in app.registered_groups}
    stems = {path.stem for path in (SOURCE / "cli").glob("*.py")} - {"__init__"}
    assert stems - commands == {"app", "listings", "options", "sweep"}


def test_units_stand_at_the_end() -> None:
    """A unit is the last word, or comes before `per`, as in `ms_per_step`."""
    wrong = [
        f"{file}:{line} {name}"
        for file, tree in trees().items()
        for name, line in identifiers(tree)
        for word, next_word in pairwise(words_of(name))
        if word in {"ms", "us", "mb", "gb"} and next_word != "per"
    ]
    assert not wrong


def test_settings_are_words() -> None:
    """Settings have no Greek letters in their names, except in established terms."""
    from rlflame.config.algorithms import AlgorithmSections

    sections = [field.annotation for field in AlgorithmSections.model_fields.values()]
    models = [
        next(m for m in (*get_args(section), section) if hasattr(m, "model_fields"))
        for section in sections
    ]
    names = {name for model in models for name in model.model_fields}
    greek = {"alpha", "beta", "gamma", "delta", "epsilon", "lambda", "sigma", "tau", "theta"}
    assert {name for name in names if greek & set(words_of(name))} == {"adam_epsilon", "gae_lambda"}


def test_the_exemptions_are_few_and_needed() -> None:
    assert len(EXEMPTIONS) <= 10
    assert all(EXEMPTIONS.values())
    names = {name for tree in trees().values() for name, _ in identifiers(tree)}
    assert EXEMPTIONS.keys() <= names
    names = {node.name for _, node in functions()}
    assert not VERBS - {words_of(name)[0] for name in names}
    assert not FORMULAS - names


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def f(given):\n    self.said = one = given", {"f", "given", "said", "one"}),
        ("class Told: ...\nfor found in x: pass", {"Told", "found"}),
        ("with a as theirs, b as (mine, x): pass", {"theirs", "mine", "x"}),
        ("try: pass\nexcept E as told: import os as found", {"told", "found"}),
        ("match a:\n case [x, *said]: pass\n case {1: y, **one}: pass", {"x", "said", "y", "one"}),
    ],
)
def test_the_search_sees_every_kind_of_name(code: str, names: set[str]) -> None:
    assert {name for name, _ in identifiers(ast.parse(code))} == names
