"""Output contains no control characters of names, files or workers.

Each command prints a value that contains ESC, BEL, CR, backspace, a C1 control character, a
bidirectional override and, in names, a newline and a byte that is not UTF-8.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import TINY, Spoken, finished, process, rlflame

from rlflame.analysis.plots import matplotlib_backend, terminal_backend
from rlflame.analysis.plots.chart import Bars, Chart, Series
from rlflame.analysis.report.document import (
    Document,
    Section,
    Table,
    to_html,
    to_markdown,
)
from rlflame.config.recipe import RunConfig
from rlflame.config.toml_io import format_value, parse
from rlflame.console import output
from rlflame.console.live import EscapingConsole
from rlflame.errors import RlflameError, format_shell
from rlflame.terminal_text import EscapingStream, escape_controls, escape_line

#: Terminals interpret all of these. A pseudo-terminal adds CR to each newline.
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x08\x7f\r\x9b31m\u202etxt\u2066\u200f\u061c[/red]"
#: A folder name that `train` accepts. It refuses names that are not UTF-8.
UTF8_NAME = "run\x1b[2J\x07\r\n\x9b1m\u202ex[red]`|<b>"
#: A folder name that another program has created.
NAME = f"{UTF8_NAME}\udcff"

ENVIRONMENT = f"""
import sys, warnings
import gymnasium
import numpy as np
HOSTILE = {HOSTILE!r}

class Evil(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail_at=0, word=""):
        self.fail_at, self.steps = fail_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        self.steps += 1
        print(HOSTILE, flush=True)
        warnings.warn(HOSTILE)
        if self.steps == self.fail_at:
            raise RuntimeError(HOSTILE + "\\nsecond line")
        return np.zeros(2, np.float32), 1.0, self.steps % 5 == 0, False, {{}}

gymnasium.register("Evil-v0", entry_point=Evil)
"""


def assert_harmless(spoken: Spoken) -> None:
    assert not RAW.search(spoken.out), ascii(spoken.out)
    assert not RAW.search(spoken.err), ascii(spoken.err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run in a folder with a hostile name."""
    folder = tmp_path_factory.mktemp("injection")
    (folder / "evil_env.py").write_text(ENVIRONMENT)
    run = folder / UTF8_NAME
    spoken = rlflame(
        "train", "--env", "CartPole-v1", *TINY, "--steps", "128", "--out", run, "--plain"
    )
    assert spoken.code == 0
    assert_harmless(spoken)
    assert "\\x1b[2J\\x07\\x0d\\n\\x9b1m\\u202ex[red]" in spoken.out
    return run


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run in the current folder."""
    shutil.copytree(trained, tmp_path / NAME)
    shutil.copy(trained.parent / "evil_env.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return Path(NAME)


EACH_COMMAND = {
    "runs": (".",),
    "runs --json": (".",),
    "inspect": ("{run}",),
    "inspect --json": ("{run}",),
    "inspect two": ("{run}", "{run}"),
    "eval": ("{run}/best.safetensors", "--episodes", "2", "--fleet", "inline"),
    "eval --json": ("{run}/best.safetensors", "--episodes", "2", "--fleet", "inline"),
    "report": ("{run}",),
    "report --json": ("{run}",),
    "plot": ("{run}", "-o", "-"),
    "resume": ("{run}", "--plain"),
    "resume --json": ("{run}",),
    "resume -q": ("{run}",),
    "export": ("{run}/best.safetensors", "-o", "{run}.safetensors"),
}


@pytest.mark.parametrize("name", EACH_COMMAND)
def test_a_hostile_folder_name_is_shown_escaped(run, name):
    command, *options = name.removesuffix(" two").split()
    words = [word.format(run=run) for word in EACH_COMMAND[name]]
    spoken = rlflame(command, *words, *options)
    assert spoken.code == 0, spoken.err
    assert_harmless(spoken)
    assert "2J" in spoken.out or command == "plot"
    if "--json" in options:
        for line in [spoken.out] if command != "resume" else spoken.lines:
            json.loads(line)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--config", HOSTILE),
        ("train", "--env", HOSTILE),
        ("train", "--env", f"{HOSTILE}:Id"),
        ("train", "--algo", HOSTILE),
        ("train", "--preset", HOSTILE),
        ("train", "--set", HOSTILE),
        ("train", "--set", f"ppo.clip_range={HOSTILE}"),
        ("train", "--set", f"{HOSTILE}=1"),
        ("train", "--env-kwargs", f"{HOSTILE}=1"),
        ("train", "--seeds", HOSTILE),
        ("train", "--seed", HOSTILE),
        ("train", "--device", HOSTILE),
        ("train", "--learners", HOSTILE),
        ("train", "--fleet", HOSTILE),
        ("train", "--env-file", f"{HOSTILE}.py"),
        ("train", "--init-from", HOSTILE),
        ("resume", HOSTILE),
        ("eval", HOSTILE),
        ("inspect", HOSTILE),
        ("runs", HOSTILE),
        ("config", HOSTILE),
        ("envs", f"--{HOSTILE}"),
        ("plot", HOSTILE),
        ("plot", ".", "-x", HOSTILE),
        ("report", HOSTILE),
        ("report", f"-{HOSTILE}"),
        ("report", ".", "--require", HOSTILE),
        ("render", HOSTILE),
        ("render", ".", "-o", HOSTILE),
        ("export", HOSTILE, "-o", HOSTILE),
        ("bench", "--diff", HOSTILE, HOSTILE),
        ("bench", HOSTILE),
        ("cluster-check", HOSTILE),
        (HOSTILE,),
        (f"--{HOSTILE}",),
    ],
    ids=lambda words: " ".join(ascii(word)[:14] for word in words),
)
def test_a_hostile_word_of_the_command_line_is_shown_escaped(words, tmp_path, monkeypatch, capsys):
    from rlflame.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlflame", *words])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces both
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(os, "_exit", sys.exit)  # used if gRPC or Arrow is loaded
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code
    said = capsys.readouterr()
    assert said.err
    assert_harmless(Spoken(2, said.out, said.err))


@pytest.mark.parametrize("debug", [(), ("--debug",)], ids=["", "debug"])
@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_hostile_environments_are_shown_escaped(run, fleet, debug):
    spoken = finished(
        process(
            *("train", "--env", "evil_env:Evil-v0", "--env-file", "evil_env.py"),
            *("--env-kwargs", "fail_at=3", "--env-kwargs", f"word={HOSTILE}", *TINY),
            *(
                "--fleet",
                fleet,
                "--workers",
                "1",
                "--steps",
                "64",
                "--out",
                f"{UTF8_NAME}-2",
                *debug,
            ),
        )
    )
    assert spoken.code == 1
    assert "RuntimeError" in spoken.err
    assert "owned" in spoken.err
    assert_harmless(spoken)


def test_what_a_worker_prints_is_relayed_escaped(run):
    spoken = finished(
        process(
            *("train", "--env", "evil_env:Evil-v0", "--env-file", "evil_env.py", *TINY),
            *("--fleet", "local", "--workers", "1", "--steps", "64", "--out", "o", "--debug"),
        )
    )
    assert spoken.code == 0, spoken.err
    assert "\\x1b]0;owned" in spoken.err
    assert_harmless(spoken)


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "episodes.csv"])
@pytest.mark.parametrize("command", ["runs", "report", "plot", "resume", "inspect"])
def test_hostile_files_are_shown_escaped(run, file, command):
    lines = (run / file).read_text().splitlines(keepends=True)
    for damage in (f"{HOSTILE}\n", f'"{HOSTILE}" = "{HOSTILE}"\n', f'{{"{HOSTILE}": "x"}}\n'):
        (run / file).write_text("".join([damage, *lines]))
        words = ("runs",) if command == "runs" else (command, NAME)
        assert_harmless(rlflame(*words, *(("-o", "-") if command == "plot" else ())))


def hostile_checkpoint(run: Path, target: str) -> None:
    """The checkpoint with another text of the same length for its environment."""
    for file in run.rglob("*.safetensors"):
        if not file.is_symlink():
            data = file.read_bytes()
            padded = target.encode()[:11]
            assert b"CartPole-v1" in data
            file.write_bytes(data.replace(b"CartPole-v1", padded.ljust(11)))


@pytest.mark.parametrize("command", ["inspect", "eval", "resume", "runs", "export", "render"])
def test_hostile_metadata_of_a_checkpoint_is_shown_escaped(run, command):
    hostile_checkpoint(run, "\u202e\x9b2J\x7fx")
    words = {"runs": (), "export": (NAME, "-o", "x.safetensors")}.get(command, (NAME,))
    assert_harmless(rlflame(command, *words))
    assert_harmless(rlflame(command, *words, "--debug"))


def on_a_terminal(*words: str | Path) -> str:
    """The output of a command on a terminal, with the original newlines."""
    leader, follower = pty.openpty()
    running = process(
        *words, stdout=follower, stderr=follower, environment={"TERM": "xterm-256color"}
    )
    os.close(follower)
    seen = b""
    while select.select([leader], [], [], 60.0)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(leader)
    assert running.wait(60) == 0, seen
    return seen.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


@pytest.mark.parametrize("seeds", [(), ("--seeds", "0-1")], ids=["run", "seeds"])
def test_the_live_display_escapes_values_and_takes_no_markup(tmp_path, monkeypatch, seeds):
    monkeypatch.chdir(tmp_path)
    said = on_a_terminal(
        "train",
        "--env",
        "CartPole-v1",
        *TINY,
        "--steps",
        "64",
        "--out",
        f"{UTF8_NAME}[/red]",
        *seeds,
    )
    # Rich prints colours, cursor movements, erasures, and CR before it draws again.
    own = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[12]?[AKG]|\r", "", said)
    assert not RAW.search(own), ascii(own)
    assert "\x1b[2J" not in said
    assert "[red]" in own
    assert "[/red]" in own


def test_the_console_escapes_text_and_keeps_its_own_sequences():
    sink = io.StringIO()
    console = EscapingConsole(
        file=sink, force_terminal=True, color_system="standard", width=200, highlight=False
    )
    console.print(HOSTILE, style="bold", markup=False)
    console.show_cursor(True)
    said = sink.getvalue()
    assert "\x1b[1m" in said
    assert "\x1b[?25h" in said
    assert not RAW.search(re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25h", "", said))
    assert "\\x1b[2J" in said


def test_every_way_to_print_escapes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rlflame"])
    error = RlflameError(f"a{HOSTILE}\nb", f"c{HOSTILE}\nd", f"e{HOSTILE}\n\tf")
    output.print_result(f"x{HOSTILE}\ny")
    output.print_result_lines(f"x{HOSTILE}\n\ty")
    output.print_report(f"{HOSTILE}\nz")
    output.print_error(error, debug=True, as_json=True)
    overwritten = io.StringIO()
    output.overwrite_line(overwritten, HOSTILE)
    said = capsys.readouterr()
    assert_harmless(Spoken(0, said.out, said.err))
    assert said.out.splitlines()[0].endswith("\\ny")
    assert "\n\ty\n" in said.out
    assert "\n\tf\n" in said.err
    assert not RAW.search(overwritten.getvalue().removeprefix("\r\x1b[K"))
    assert json.loads(said.out.splitlines()[-1])["message"] == error.message


@pytest.mark.parametrize(
    "statement",
    [
        "print(H)",
        "import warnings; warnings.warn(H)",
        "import logging; logging.warning('%s', H)",
        "import threading; t = threading.Thread(target=int, args=(H,)); t.start(); t.join()",
        "raise ValueError(H)",
        "sys.stdout.writelines([H])",
    ],
)
def test_what_others_print_in_the_process_of_a_command_is_escaped(statement):
    code = (
        "import sys; from rlflame.console import output as mouth; mouth.escape_standard_streams();"
        f"H = {HOSTILE!r}; {statement}"
    )
    result = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code], capture_output=True, timeout=60
    )
    # Decode here: the text mode of a pipe would turn CR into a newline.
    out, err = (
        octets.decode("utf-8", "surrogatepass") for octets in (result.stdout, result.stderr)
    )
    assert "owned" in out + err
    assert_harmless(Spoken(0, out, err))


def test_a_stream_escapes_and_is_otherwise_the_stream():
    sink = io.StringIO()
    stream = EscapingStream(sink)
    assert stream.write("a\x1b\n\t") == 4
    stream.writelines(["b\u202e", "c"])
    assert sink.getvalue() == "a\\x1b\n\tb\\u202ec"
    assert not stream.isatty()


def test_every_character_that_a_terminal_obeys_is_escaped_and_no_other():
    obeyed = {chr(code) for code in range(0x110000) if RAW.match(chr(code))}
    for code in range(0x110000):
        character = chr(code)
        assert (escape_controls(character) != character) == (character in obeyed)
    assert escape_line("a\nb\tc\x1b\u202e\udcff") == "a\\nb\tc\\x1b\\u202e\\udcff"


@pytest.mark.parametrize("value", [HOSTILE, f"{HOSTILE}\n\t\\\"'", "é[1]"])
def test_toml_and_json_are_ascii_for_terminals_and_read_back(value):
    text = f"x = {format_value({'k': value, value: 1})}"
    assert not RAW.search(text)
    assert parse(text)["x"] == {"k": value, value: 1}
    said = output.as_json_text({value: [value]}, indent=2)
    assert not RAW.search(said)
    assert json.loads(said) == {value: [value]}


def test_a_dry_run_prints_toml_that_reads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoken = rlflame(
        "train", "--env", "CartPole-v1", "--dry-run", "--out", "a\x7f\x9b\u202e", "--no-such"
    )
    assert spoken.code == 2
    spoken = rlflame("train", "--env", "CartPole-v1", "--dry-run", "--out", "a\x7f\x9b\u202e")
    assert_harmless(spoken)
    config = RunConfig.model_validate(parse(spoken.out))
    assert str(config.runtime.out) == "a\x7f\x9b\u202e"
    tomllib.loads(spoken.out)


@pytest.mark.parametrize(
    "word", [HOSTILE, NAME, "it's; touch owned", "\x1b'; touch owned; '", "\\\x1b", "a\nb", "é"]
)
def test_a_command_to_paste_has_no_control_characters_and_means_the_same(word, tmp_path):
    command = format_shell("printf", "%s", word)
    assert not RAW.search(command)
    assert "\n" not in command
    octets = os.fsencode(word)
    if shutil.which("bash"):
        said = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path)
        assert said.stdout == octets
    # Another shell may print other bytes, but runs nothing.
    subprocess.run(["sh", "-c", command], capture_output=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_usage_errors_escape_as_json_too(tmp_path):
    spoken = finished(process("runs", "--json", f"--x{HOSTILE}", cwd=tmp_path))
    assert spoken.code == 2
    assert_harmless(spoken)
    json.loads(spoken.lines[-1])


EVIL = f"</title><script>alert(1)</script>|`x`\n# [a](javascript:alert) ``` {HOSTILE}\udcff"
CHART = Chart(
    EVIL,
    EVIL,
    EVIL,
    (Series(EVIL, np.array([0.0, 1.0]), np.array([0.0, 1.0])),),
    notes=(EVIL,),
)
DOCUMENT = Document(
    EVIL,
    (Section(EVIL, (EVIL, Table((EVIL, "n"), ((EVIL, EVIL),), 1), CHART)),),
)


def test_a_page_runs_no_script_of_a_name():
    text = to_html(DOCUMENT)
    assert "<script" not in text
    assert not RAW.search(text)
    text.encode()


def test_markdown_takes_no_markup_from_a_name():
    text = to_markdown(DOCUMENT)
    assert not RAW.search(text)
    text.encode()
    fence, outside = "", []
    for line in text.splitlines():
        ticks = re.match("`{3,}", line)
        if ticks and (not fence or line == fence):
            fence = "" if fence else line
        elif not fence:
            outside.append(line)
    assert not fence
    assert not [line for line in outside if re.search(r"(?<!\\)[<`]|\]\(", line)]
    assert sum(line.startswith("#") for line in outside) == 2
    rows = [line for line in outside if line.startswith("| ") and "---" not in line]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [3, 3]


def test_a_chart_escapes_its_words_wherever_it_is_drawn():
    assert "<script" not in matplotlib_backend.render_svg(CHART)
    bars = Bars(
        title=EVIL, x_label=EVIL, y_label=EVIL, groups=(EVIL,), names=(EVIL,),
        heights=np.array([[1.0]]), ideal=np.array([1.0]), notes=(EVIL,),
    )  # fmt: skip
    for drawing in (CHART, bars):
        assert not RAW.search(terminal_backend.render_text(drawing, 60))


def test_a_picture_with_hostile_names_is_xml():
    pytest.importorskip("matplotlib")
    data = matplotlib_backend.render_image(CHART, Path("x.svg"))
    ElementTree.fromstring(data)
    assert b"<script" not in data
    assert not RAW.search(data.decode())
