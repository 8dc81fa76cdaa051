"""Yields all damaged variants of a text file of a run, always the same ones.

This module does not use pytest and does not know the meaning of the files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

#: Replacements for a value: another type, too large, not a number, empty, deeply nested.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 10**30, 10**400, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "x", "1", "\x00\ud800", [], [1, "x"], {}, {"x": None}, [[[[]]]],
)  # fmt: skip
JUNK = (
    b"", b"\n", b"\n\n\n", b"\x00" * 64, bytes(range(256)), b"\xff\xfe{}", b"[" * 100_000,
    b"null\n", b"[]\n", b"{}\n", b"1\n", b'"x"\n', b"\xef\xbb\xbf{}\n", b"a" * 100_000,
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all parts of a JSON value, and to the value itself."""
    yield at
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inner:
        yield from places(part, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    whole = copy.deepcopy(value)
    part = whole
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = new
    return whole


def without(value: Any, at: tuple[Any, ...]) -> Any:
    whole = copy.deepcopy(value)
    part = whole
    for key in at[:-1]:
        part = part[key]
    del part[at[-1]]
    return whole


def of_json(value: Any) -> Iterator[tuple[str, Any]]:
    """Change or remove one part of the value. Yields a description and the result."""
    for at in places(value):
        for new in ODD:
            yield f"{list(at)} = {new!r:.20}", changed(value, at, new)
        if at:
            yield f"{list(at)} absent", without(value, at)


def of_json_file(text: bytes) -> Iterator[tuple[str, bytes]]:
    for what, value in of_json(json.loads(text)):
        yield what, json.dumps(value).encode("utf-8", "surrogatepass")
    yield from of_bytes(text)


def of_json_lines(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Change one line of each kind. The names in a line determine its kind."""
    lines = text.splitlines(keepends=True)
    kinds: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines):
        kinds.setdefault(tuple(json.loads(line)), number)
    for number in kinds.values():
        for what, value in of_json(json.loads(lines[number])):
            new = json.dumps(value).encode("utf-8", "surrogatepass") + b"\n"
            yield f"line {number} {what}", b"".join([*lines[:number], new, *lines[number + 1 :]])
    yield from of_bytes(text)


def of_table(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Change or remove a cell of the header or of the first line."""
    lines = text.splitlines(keepends=True)
    odd = ("", "x", "nan", "inf", "-inf", "1e400", "9" * 400, "-1", "0x10", '"', "\x00", "é")
    for number in (0, 1):
        cells = lines[number].rstrip(b"\n").split(b",")
        for place in range(len(cells)):
            for new in odd:
                row = [*cells[:place], new.encode(), *cells[place + 1 :]]
                whole = [*lines[:number], b",".join(row) + b"\n", *lines[number + 1 :]]
                yield f"cell {number},{place} = {new:.9}", b"".join(whole)
            row = [*cells[:place], *cells[place + 1 :]]
            whole = [*lines[:number], b",".join(row) + b"\n", *lines[number + 1 :]]
            yield f"cell {number},{place} absent", b"".join(whole)
    yield from of_bytes(text)


def of_toml(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Change the value of each line, or remove the line or heading."""
    lines = text.splitlines(keepends=True)
    odd = (
        "true", "-1", "0", "0.5", "1" + "0" * 30, "1" + "0" * 5000, "nan", "inf", '""', '"x"',
        '"none"', "[]", "{}", "[[[]]]", "1979-05-27", '"\\u0000"',
    )  # fmt: skip
    for number, line in enumerate(lines):
        name, equals, _ = line.partition(b"=")
        yield f"line {number} absent", b"".join([*lines[:number], *lines[number + 1 :]])
        if equals:
            for new in odd:
                row = name + b"= " + new.encode() + b"\n"
                yield (
                    f"{name.decode().strip()} = {new:.20}",
                    b"".join([*lines[:number], row, *lines[number + 1 :]]),
                )
    yield from of_bytes(text)


def of_bytes(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Truncate, repeat, reorder or replace the text."""
    for share in (1, 25, 50, 75, 99):
        yield f"{share}% of it", text[: len(text) * share // 100]
    lines = text.splitlines(keepends=True)
    yield "backwards", b"".join(reversed(lines))
    yield "every line twice", b"".join(line for line in lines for _ in range(2))
    yield "empty lines", b"\n".join(lines)
    yield "other line ends", text.replace(b"\n", b"\r\n")
    yield (
        "a half line in between",
        b"".join([*lines[:1], *(line[: len(line) // 2] for line in lines[1:2]), *lines[2:]]),
    )
    yield "no last line end", text.rstrip(b"\n")
    for junk in JUNK:
        yield f"{junk[:8]!r}...", junk
        yield f"{junk[:8]!r}... behind it", text + junk
