"""Makes the tables of docs/guides/environments.md from docs/results/environments.csv."""

from __future__ import annotations

from itertools import groupby

from records import Row, format_table, read_records

#: The columns of a row that say what was done with an environment.
CHECKS = ("trained", "resumed", "evaluated", "rendered")
GOOD = ("yes", "equal")


def make_package_table() -> str:
    """The number of environments of each package that pass all checks."""
    rows = []
    for package, group in groupby(read_records("environments.csv"), lambda row: row["package"]):
        tests = [*group]
        counts = [sum(is_good(row, name) for row in tests) for name in CHECKS]
        label = f"{package} {tests[0]['version']}".strip()
        rows.append([label, str(len(tests)), *map(str, counts)])
    return format_table(("package", "tests", "trained", "resumed", "evaluated", "rendered"), rows)


def make_table() -> str:
    """The result of each check for each environment."""
    rows = []
    for row in read_records("environments.csv"):
        options = f" `{row['options']}`" if row["options"] else ""
        algorithm = row["algorithm"].upper()
        steps = f"{int(row['steps']):,}" if row["steps"] else ""
        checks = [row[name] for name in CHECKS]
        rows.append([row["environment"] + options, row["package"], algorithm, steps, *checks,
                     row["seconds"], format_notes(row)])  # fmt: skip
    head = ("environment, options", "package", "algorithm", "steps", *CHECKS, "seconds", "notes")
    return format_table(head, rows)


def is_good(row: Row, check: str) -> bool:
    return row[check] in GOOD


def format_notes(row: Row) -> str:
    """Describe what rlflame did with an environment, or why it refused it."""
    notes = []
    if row["masks"]:
        notes.append("action masks")
    if row["episodes"] == "fresh":
        notes.append("a new instance for each episode")
    if row["ignored"]:
        notes.append(f"without `{row['ignored']}`")
    if row["gymnasium"].startswith("fails"):
        notes.append("fails in plain Gymnasium too")
    if row["message"]:
        notes.append(row["message"].replace("|", "\\|"))
    return "; ".join(notes)
