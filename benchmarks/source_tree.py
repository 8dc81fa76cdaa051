"""Count the files and lines of each package for docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

from records import ROOT

SOURCE = ROOT / "src" / "rlflame"


def make_table() -> str:
    """Make a table with a row for each package and one for the other modules."""
    rows = []
    modules = sorted(SOURCE.glob("*.py"))
    names = ", ".join(path.stem for path in modules if not path.stem.startswith("__"))
    rows.append(("(root)", len(modules), count_lines(modules), names))
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        files = sorted(folder.rglob("*.py"))
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        first = docstring.splitlines()[0].rstrip(".")
        rows.append((f"`{folder.name}/`", len(files), count_lines(files), first))
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows), ""))
    lines = [f"| {name} | {files} | {lines:,} | {text} |" for name, files, lines, text in rows]
    return "\n".join(["| package | files | lines | contents |", "|---|--:|--:|---|", *lines])


def count_lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)
