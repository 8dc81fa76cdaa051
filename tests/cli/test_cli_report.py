"""`rlflame report`: correct numbers, one complete file, a reliable verdict."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from commands import TINY, finished, process, rlflame
from run_files import make


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def side(folder, finals, **given):
    """Make runs of one recipe with these final evaluations."""
    for seed, final in enumerate(finals):
        make(
            folder / f"s{seed}", seed=seed, final=final, iterations=[(500, 1.0), (1000, 2.0)],
            seconds=[(500, 20.0), (1000, 30.0)],
            evaluations=[(s, s / 10 + seed) for s in (300, 600, 900)], **given,
        )  # fmt: skip
    return folder


def cells(markdown, title):
    """The rows of the first table below a heading, as dictionaries."""
    lines = markdown.partition(f"## {title}\n")[2].splitlines()
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    assert len(rows) > 2, f"there is no table below {title}"
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def each_run(markdown):
    """The rows of the second table about returns."""
    return cells("## Runs\n" + markdown.partition("Each run, with")[2], "Runs")


# One run and its seeds


def test_a_report_of_a_real_run_says_what_its_files_say(tmp_path):
    out = tmp_path / "it"
    assert rlflame("train", *TINY, "--steps", "256", "--out", out).code == 0
    recorded = json.loads((out / "result.json").read_text())["evaluation"]
    facts = rlflame("report", out, "--json").json()
    (run,) = facts["runs"]
    assert {name: run["final"][name] for name in ("mean", "low", "high", "episodes")} == {
        name: recorded[name] for name in ("mean", "low", "high", "episodes")
    }
    wall = sum(json.loads(line)["wall_s"] for line in (out / "timing.jsonl").open())
    assert run["steps"] == 256
    assert run["steps_per_s"] == pytest.approx(256 / wall)
    assert facts["machine"]["processor"]
    assert facts["machine"]["cores"] >= facts["machine"]["usable_cores"] >= 1
    assert facts["machine"]["packages"]["numpy"]
    assert facts["cluster"]["fleet"] == "inline"
    markdown = rlflame("report", out).out
    (row,) = cells(markdown, "Returns")
    assert (row["mean"], row["std"]) == (f"{recorded['mean']:,.1f}", "-")
    (row,) = cells(markdown, "Machines")
    assert "numpy" in row["versions"]
    assert row["processor"] == facts["machine"]["processor"]


def test_seeds_are_taken_together(tmp_path):
    side(tmp_path / "a", [100.0, 200.0, 300.0, 400.0])
    markdown = rlflame("report", "a").out
    (row,) = cells(markdown, "Returns")
    assert row["recipe"] == "PPO, 4 seeds"
    assert row["IQM [95% interval]"].startswith("250.0 [")  # the middle two of four runs
    assert (row["mean"], row["std"]) == ("250.0", "129.1")  # squares 22500+2500+2500+22500 over 3
    assert row["worst seed"] == "100.0"
    # At 900 steps they have 90, 91, 92, 93: squares 2.25+0.25+0.25+2.25 over 3.
    assert row["P2"] == row["P4"] == "91.5 (1.3)"
    # Returns and throughput are two tables: 1,000 steps in 20 + 30 seconds.
    speeds = cells(markdown, "Throughput")
    assert [row["steps/s"] for row in speeds] == ["20"] * 4
    assert speeds[0]["time, s"] == "50.0"
    assert speeds[0]["collect"] == "25%"
    assert speeds[0]["processor time, s"] == "75.0"  # driver 25 s, workers 50 s
    best = rlflame("report", "a", "--json").json()["runs"][0]["best"]
    assert (best["steps"], best["mean"]) == (1000, 100.0)  # better than the evaluations of 30 to 90


def test_runs_without_a_final_evaluation_have_none(tmp_path):
    make(tmp_path / "a", iterations=[(100, 1.0)])
    (row,) = cells(rlflame("report", "a").out, "Returns")
    assert row["mean"] == "-"


def test_an_unfinished_run_is_marked_and_shows_its_best_so_far(tmp_path):
    # The run stopped early, after evaluations of 10, 40 and 20, without a final evaluation.
    make(tmp_path / "a", iterations=[(300, 1.0)],
         evaluations=[(100, 10.0), (200, 40.0), (300, 20.0)])  # fmt: skip
    spoken = rlflame("report", "a")
    (row,) = cells(spoken.out, "Returns")
    assert row["IQM [95% interval]"] == "0 of 1 finished"
    assert row["IQM of best evaluations"] == "40.0"
    assert (row["mean"], row["worst seed"]) == ("-", "-")
    (run,) = each_run(spoken.out)
    assert (run["final"], run["best"], run["at step"]) == ("unfinished", "40.0 [39.0, 42.0]", "200")
    (facts,) = rlflame("report", "a", "--json").json()["runs"]
    assert facts["unfinished"] is True
    assert facts["best"]["mean"] == 40.0


def test_a_run_that_has_gone_on_since_its_final_evaluation_is_unfinished(tmp_path):
    make(tmp_path / "a", final=70.0, stop=1000, iterations=[(1000, 1.0), (1500, 2.0)],
         evaluations=[(1000, 50.0), (1500, 60.0)])  # fmt: skip
    (row,) = cells(rlflame("report", "a").out, "Returns")
    assert row["IQM [95% interval]"] == "0 of 1 finished"
    # This was the final evaluation at step 1,000, and it is the best so far.
    assert row["IQM of best evaluations"] == "70.0"


def test_of_seeds_some_may_be_finished_and_some_not_yet_evaluated(tmp_path):
    side(tmp_path / "a", [100.0, 300.0])
    make(tmp_path / "a/s2", seed=2, iterations=[(100, 1.0)])
    (row,) = cells(rlflame("report", "a").out, "Returns")
    assert row["seeds"] == "3"
    assert row["IQM [95% interval]"] == "2 of 3 finished"
    assert row["IQM of best evaluations"] == "200.0"
    (group,) = rlflame("report", "a", "--json").json()["groups"]
    assert (group["unfinished"], group["final"]) == (1, None)


def test_json_goes_to_standard_output_also_where_a_file_is_written(tmp_path):
    side(tmp_path / "a", [1.0])
    alone = rlflame("report", "a", "--json")
    for name in ("r.html", "r.md", "r.json"):
        both = rlflame("report", "a", "--json", "-o", name)
        assert (both.code, both.out, both.err) == (0, alone.out, f"{name}\n")
        assert (tmp_path / name).read_bytes() != b""
    assert json.loads((tmp_path / "r.json").read_text()) == alone.json()
    assert Links((tmp_path / "r.html").read_text()).tags[0] == "html"


def test_the_executors_and_nodes_of_a_cluster_are_reported(tmp_path):
    folder = side(tmp_path / "a", [1.0], fleet="flame", capacity=8) / "s0"
    machines = json.loads((folder / "machines.json").read_text())
    machines[0]["workers"] = [
        {"number": 3, "host": "one", "numpy": "2.0"},
        {"number": 2, "host": "two", "numpy": "2.1"},
    ]
    (folder / "machines.json").write_text(json.dumps(machines))
    cluster = rlflame("report", "a", "--json").json()["cluster"]
    assert (cluster["executors"], cluster["nodes"], cluster["fleet"]) == (5, 2, "flame")
    markdown = rlflame("report", "a").out
    (speed,) = cells(markdown, "Throughput")
    assert speed["rollouts on"] == "flame, 8 executors on 2 nodes"
    assert speed["processor time, s"] == "-"
    assert "| two " in markdown


# The HTML page


class Links(HTMLParser):
    """The links and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [v for name, v in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_complete_in_itself(tmp_path):
    side(tmp_path / "a", [100.0, 120.0, 130.0])
    side(tmp_path / "b", [90.0, 80.0, 95.0], clip=0.3)
    spoken = rlflame("report", "a", "--vs", "b", "-o", "r.html")
    assert (spoken.code, spoken.out) == (0, "r.html\n"), spoken.err
    text = (tmp_path / "r.html").read_text()
    page = Links(text)
    assert all(link.startswith("#") for link in page.loaded)
    assert "http" not in text
    assert text.count("url(") == text.count("url(#")
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert page.tags.count("svg") == 2  # over steps and over time
    assert "width=device-width" in text
    # The texts are those of the Markdown report.
    markdown = rlflame("report", "a", "--vs", "b").out
    for row in cells(markdown, "Comparison") + cells(markdown, "Returns"):
        assert set(row.values()) <= set(page.texts)


def test_what_a_page_holds_is_text_and_never_markup(tmp_path):
    side(tmp_path / "<b>x</b>&", [1.0])
    assert rlflame("report", "<b>x</b>&", "-o", "r.html").code == 0
    page = Links((tmp_path / "r.html").read_text())
    assert "b" not in page.tags
    assert "<b>x</b>&/s0" in "".join(page.texts)


def test_a_curve_lies_where_its_numbers_are(tmp_path):
    side(tmp_path / "a", [1.0])
    rlflame("report", "a", "-o", "r.html")
    text = (tmp_path / "r.html").read_text()
    points = re.search(r'<path d="([^"]*)"[^>]*stroke: #0072b2', text).group(1)
    places = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", points)]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # steps 300, 600, 900
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # returns 30, 60, 90: y decreases upwards
    assert y0 > y2


def test_a_page_is_the_same_each_time_it_is_written(tmp_path):
    side(tmp_path / "a", [1.0])
    pages = []
    for name in ("r.html", "s.html"):
        assert rlflame("report", "a", "-o", name).code == 0
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_without_matplotlib_a_page_draws_its_curves_as_a_terminal_does(tmp_path, monkeypatch):
    side(tmp_path / "a", [1.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert rlflame("report", "a", "-o", "r.html").code == 0
    page = Links((tmp_path / "r.html").read_text())
    assert "svg" not in page.tags
    assert page.tags.count("pre") == 2  # over steps and over time
    assert "PPO" in "".join(page.texts)


# Comparisons


@pytest.mark.parametrize(
    ("ours", "verdict", "shown"),
    [
        ([150, 151, 152, 153], "better, not worse", {"better", "not-worse"}),
        ([101, 102, 99, 100], "not worse, equivalent", {"equivalent", "not-worse"}),
        ([50, 51, 52, 50], "worse", set()),
        ([20, 190, 100, 60], "undecided", set()),
        ([100, 95, 113, 120], "not worse", {"not-worse"}),
        ([150, 151], "unknown with fewer than 3 seeds", set()),
    ],
)
def test_verdicts_and_exit_codes(tmp_path, ours, verdict, shown):
    side(tmp_path / "ours", [float(x) for x in ours])
    side(tmp_path / "theirs", [100.0, 101.0, 99.0, 100.0], clip=0.3)
    words = ("report", "ours", "--vs", "theirs")
    (row,) = cells(rlflame(*words).out, "Comparison")
    assert row["verdict"] == verdict
    for claim in ("better", "equivalent", "not-worse"):
        spoken = rlflame(*words, "--require", claim)
        assert spoken.code == (0 if claim in shown else 1), (claim, spoken.err)
        assert ("Not shown: " in spoken.err) == (claim not in shown)
        assert "# Report" in spoken.out  # the report itself is printed in both cases


def test_the_margin_can_be_chosen(tmp_path):
    side(tmp_path / "a", [106.0, 107.0, 106.0])
    side(tmp_path / "b", [100.0, 100.0, 100.0], clip=0.3)
    words = ("report", "a", "--vs", "b", "--require", "equivalent")
    assert rlflame(*words).code == 0
    spoken = rlflame(*words, "--margin", "5")
    assert spoken.code == 1
    assert "the margin is ±5" in spoken.err


def test_every_environment_must_hold(tmp_path):
    side(tmp_path / "a/hopper", [200.0, 201.0, 202.0], environment="Hopper-v5")
    side(tmp_path / "a/ant", [100.0, 101.0, 102.0], environment="Ant-v5")
    side(tmp_path / "b/hopper", [100.0, 101.0, 102.0], environment="Hopper-v5")
    side(tmp_path / "b/ant", [100.0, 101.0, 102.0], environment="Ant-v5")
    words = ("report", "a/hopper", "a/ant", "--vs", "b/hopper", "b/ant")
    rows = cells(rlflame(*words).out, "Comparison")
    assert [(row["environment"], row["verdict"]) for row in rows] == [
        ("Hopper-v5", "better, not worse"),
        ("Ant-v5", "not worse, equivalent"),
    ]
    spoken = rlflame(*words, "--require", "better")
    assert spoken.code == 1
    assert "better for Ant-v5" in spoken.err
    assert rlflame(*words, "--require", "not-worse").code == 0


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("absent",), 1, "absent does not exist"),
        (("empty",), 1, "empty has nothing to report yet"),
        (("a", "--vs", "unfinished"), 1, "unfinished has no final evaluation yet"),
        (("a", "--vs", "ant"), 2, "are for CartPole-v1, but those after --vs are for Ant-v5"),
        (("a", "other", "--vs", "a"), 2, "use more than one recipe"),
        (("a", "--vs"), 2, "One side of --vs has no runs"),
        (("--vs", "a"), 2, "One side of --vs has no runs"),
        (("a", "--vss", "a"), 2, "There is no option --vss"),
        (
            ("a", "--require", "better"),
            2,
            "--require 'better' cannot be checked without a known claim and runs after --vs",
        ),
        (("a", "--vs", "a", "--require", "best"), 2, "--vs RUN... --require better, equivalent"),
        (("a", "--vs", "a", "--margin", "0"), 2, "--margin is 0"),
        (("a", "-o", "r.pdf"), 2, ".md, .html or .json file, not as 'r.pdf'"),
        (("a", "-o", "nowhere/r.md"), 1, "nowhere/r.md could not be written"),
        (("a", "x.json"), 2, "A report takes one benchmark result"),
    ],
)
def test_what_cannot_be_reported_is_a_sentence(tmp_path, words, code, sentence):
    side(tmp_path / "a", [1.0, 2.0, 3.0])
    side(tmp_path / "ant", [1.0], environment="Ant-v5")
    side(tmp_path / "other", [1.0, 2.0, 3.0], clip=0.3)
    make(tmp_path / "unfinished", iterations=[(100, 1.0)])
    make(tmp_path / "empty")
    spoken = rlflame("report", *words)
    assert spoken.code == code, spoken.out
    assert sentence in spoken.err
    assert "  hint: " in spoken.err
    assert ("hint: mkdir -p nowhere\n" in spoken.err) == ("nowhere" in sentence)


def test_a_row_is_a_line_whatever_a_folder_is_called(tmp_path):
    side(tmp_path / "two\nlines|and", [1.0])
    (row,) = each_run(rlflame("report", "two\nlines|and").out.replace("\\|", "/"))
    assert row["run"] == "two\\nlines/and/s0"
    listed = rlflame("runs", "two\nlines|and").out.splitlines()
    assert len(listed) == 2


def test_a_terminal_of_ascii_gets_a_report_of_ascii(tmp_path):
    side(tmp_path / "a", [1.0, 2.0])
    spoken = finished(process("report", "a", environment={"PYTHONIOENCODING": "ascii"}))
    assert spoken.code == 0
    assert spoken.out.isascii()
    assert "\\" not in spoken.out
    (row,) = cells(spoken.out, "Returns")
    assert (row["mean"], row["std"]) == ("1.5", "0.7")
    written = finished(
        process("report", "a", "-o", "r.md", environment={"PYTHONIOENCODING": "ascii"})
    )
    assert written.code == 0
    assert not (tmp_path / "r.md").read_text("utf-8").isascii()  # Braille curves


@pytest.mark.parametrize(
    "machines",
    [
        '[{"machine": 5}]',
        '[{"capacity": "many", "fleet": 1}]',
        '[{"fleet": "flame", "workers": [{"number": "x"}]}]',
        '[{"fleet": "flame", "workers": 3}]',
    ],
)
def test_a_machine_that_cannot_be_read_is_unknown(tmp_path, machines):
    side(tmp_path / "a", [1.0])
    (tmp_path / "a/s0/machines.json").write_text(machines)
    assert cells(rlflame("report", "a").out, "Machines")[0]["memory"] == "-"


def test_a_time_that_is_no_number_is_unknown(tmp_path):
    side(tmp_path / "a", [1.0])
    with (tmp_path / "a/s0/timing.jsonl").open("a") as file:
        file.write('{"steps": 1100, "wall_s": NaN}\n')
    assert cells(rlflame("report", "a").out, "Throughput")[0]["time, s"] == "-"


def test_a_dash_is_standard_output(tmp_path):
    side(tmp_path / "a", [1.0])
    assert rlflame("report", "a", "-o", "-").out == rlflame("report", "a").out


# Benchmarks


def results(path, **values):
    measured = [
        {"name": name, "unit": "s", "better": "lower", "values": list(found)}
        for name, found in values.items()
    ]
    path.write_text(json.dumps({"measurements": measured}))
    return path.name


def test_benchmarks_by_medians_and_percent(tmp_path):
    now = results(tmp_path / "now.json", start=[8.0, 7.9, 30.0], step=[1.0, 1.1, 0.9])
    before = results(tmp_path / "before.json", start=[10.0, 10.1, 9.9], gone=[1.0, 2.0, 3.0])
    (row,) = cells(rlflame("report", now, "--vs", before).out, "Benchmark")[:1]
    assert (row["measured"], row["median before"], row["median"]) == ("start", "10.00", "8.00")
    assert row["improvement, %"].startswith("+20.0 [")  # lower is better
    listed = cells(rlflame("report", now).out, "Benchmark")
    assert [(r["measured"], r["median"], r["max"]) for r in listed] == [
        ("start", "8.00", "30.00"),
        ("step", "1.00", "1.10"),
    ]


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        ([8.0, 8.1, 7.9], {"better", "not-worse"}),
        ([10.2, 10.1, 10.3], {"equivalent", "not-worse"}),
        ([13.0, 13.1, 12.9], set()),
        ([5.0], set()),
    ],
)
def test_benchmarks_in_ci(tmp_path, now, shown):
    words = ("report", results(tmp_path / "now.json", start=now), "--vs",
             results(tmp_path / "before.json", start=[10.0, 10.1, 9.9]))  # fmt: skip
    for claim in ("better", "equivalent", "not-worse"):
        assert rlflame(*words, "--require", claim).code == (0 if claim in shown else 1), claim


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measurements": [{}]}', '{"measurements": []}',
             '{"measurements": [{"name": "a", "better": "lower", "values": [NaN]}]}']
)  # fmt: skip
def test_results_that_are_none(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    spoken = rlflame("report", "x.json")
    assert spoken.code == 1
    assert "x.json does not" in spoken.err
