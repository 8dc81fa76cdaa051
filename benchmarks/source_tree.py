"""Counts files and lines of each package, and writes the table into docs/architecture.md.

python benchmarks/source_tree.py            # print the table
python benchmarks/source_tree.py --docs     # write it between the markers
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rlflame"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- source-tree:begin -->", "<!-- source-tree:end -->"


def make_table() -> str:
    """One row for each package, and one for the modules of the root."""
    rows = [("package", "files", "lines", "contents")]
    modules = sorted(SOURCE.glob("*.py"))
    names = ", ".join(path.stem for path in modules if not path.stem.startswith("__"))
    rows.append(("(root)", str(len(modules)), f"{count_lines(modules):,}", names))
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        files = sorted(folder.rglob("*.py"))
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        first = docstring.splitlines()[0].rstrip(".")
        rows.append((f"`{folder.name}/`", str(len(files)), f"{count_lines(files):,}", first))
    files = sorted(SOURCE.rglob("*.py"))
    rows.append(("all", str(len(files)), f"{count_lines(files):,}", ""))
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---|--:|--:|---|", *body])


def count_lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="write the table into the page")
    table = make_table()
    if not parser.parse_args().docs:
        print(table)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
