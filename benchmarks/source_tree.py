"""Count the files and lines of each package for the tables in docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

from records import ROOT

SOURCE = ROOT / "src" / "rlflame"

#: Files and lines of each package before the restructuring, and where its code is now.
OLD_PACKAGES = {
    "(root)": (38, 6262, "config, experiment, rollout, storage, training"),
    "bench": (31, 3995, "bench; races with other libraries in benchmarks/"),
    "commands": (15, 2174, "cli"),
    "companion": (5, 468, "experiment/learners"),
    "crew": (5, 634, "experiment/learners, learning/parallel"),
    "display": (12, 1182, "console"),
    "doctor": (10, 1824, "fleet/flame/check"),
    "files": (7, 1343, "storage"),
    "filming": (4, 368, "rendering"),
    "fleet": (30, 4739, "fleet"),
    "history": (5, 764, "analysis, storage"),
    "learner": (30, 4651, "learning"),
    "plot": (6, 930, "analysis/plots"),
    "presets": (1, 323, "config/presets"),
    "render": (7, 915, "rendering"),
    "report": (7, 1096, "analysis/report"),
    "rollout": (31, 4516, "rollout"),
    "seeds": (14, 2017, "experiment/sweep"),
}


def make_table() -> str:
    """Make a table with one row for each package and one for the modules outside packages."""
    rows = []
    modules = sorted(SOURCE.glob("*.py"))
    names = ", ".join(path.stem for path in modules if not path.stem.startswith("__"))
    rows.append(("(root)", len(modules), count_lines(modules), names))
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        files = sorted(folder.rglob("*.py"))
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        first = docstring.splitlines()[0].rstrip(".")
        rows.append((f"`{folder.name}/`", len(files), count_lines(files), first))
    return _format_rows(("package", "files", "lines", "contents"), rows)


def make_old_table() -> str:
    rows = [(name, *counts, places) for name, (*counts, places) in OLD_PACKAGES.items()]
    return _format_rows(("old package", "files", "lines", "now in"), rows)


def _format_rows(head: tuple[str, ...], rows: list[tuple[str, int, int, str]]) -> str:
    rows = [*rows, ("all", sum(row[1] for row in rows), sum(row[2] for row in rows), "")]
    lines = [f"| {name} | {files} | {lines:,} | {text} |" for name, files, lines, text in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---|--:|--:|---|", *lines])


def count_lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)
