"""The blocks between markers are identical to the output of `write_tables.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from experiment_tables import list_studies, read_tuning
from script import read_block, write_block
from write_tables import BLOCKS


@pytest.mark.parametrize("name", BLOCKS)
def test_a_page_has_the_block_of_the_script(name: str) -> None:
    page, make_block = BLOCKS[name]
    assert read_block(page, name) == make_block()


def test_every_marker_has_its_block() -> None:
    pages = {page for page, _ in BLOCKS.values()}
    markers = [
        name for page in pages for name in re.findall(r"<!-- ([\w-]+):begin -->", page.read_text())
    ]
    assert sorted(markers) == sorted(BLOCKS)


def test_every_study_is_in_a_table_of_experiments() -> None:
    assert list_studies() == {*read_tuning()}


def test_a_block_is_replaced_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- a:begin -->\nold\n<!-- a:end -->\ntail\n")
    write_block(page, "a", "new\nlines")
    assert page.read_text() == "head\n<!-- a:begin -->\nnew\nlines\n<!-- a:end -->\ntail\n"
    assert read_block(page, "a") == "new\nlines"
    with pytest.raises(ValueError, match="b:begin"):
        write_block(page, "b", "new")
