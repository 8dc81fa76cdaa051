"""The blocks between markers are those that scripts write from the records."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "page"),
    [("readme_table", "README.md"), ("card", "docs/guides/learners.md")],
)
def test_a_page_has_the_table_of_its_script(
    script: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"))
    assert module["PAGE"].samefile(ROOT / page)
    read_block = sys.modules["script"].read_block
    assert read_block(ROOT / page, module["NAME"]) == module["make_table"]()


def test_a_block_is_replaced_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = runpy.run_path(str(ROOT / "benchmarks" / "script.py"))
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- a:begin -->\nold\n<!-- a:end -->\ntail\n")
    module["write_block"](page, "a", "new\nlines")
    assert page.read_text() == "head\n<!-- a:begin -->\nnew\nlines\n<!-- a:end -->\ntail\n"
    assert module["read_block"](page, "a") == "new\nlines"
    with pytest.raises(ValueError, match="b:begin"):
        module["write_block"](page, "b", "new")
