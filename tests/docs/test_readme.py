"""Run the commands in the README and the guides as a reader would.

Only the budgets are reduced: a patch makes each config small after the command line was parsed. CI
runs the set-up commands.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from commands import rlflame

from rlflame.bench.rollouts import RolloutsBenchmark
from rlflame.bench.runner import Benchmark
from rlflame.config import resolve as config_resolve
from rlflame.config.preset_catalog import make_short_name
from rlflame.config.recipe import RunConfig
from rlflame.experiment import resume as experiment_resume
from rlflame.experiment.resume import Budget
from rlflame.experiment.sweep import sweep_run
from rlflame.rendering import policy_render
from rlflame.storage.sweep_folder import format_folder_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STEPS, ITERATIONS = 600, 2


FENCE = re.compile(r"^```(\w*)$")


def blocks(page: Path, language: str = "") -> Iterator[list[str]]:
    """The lines of each fenced block in a language."""
    block: list[str] | None = None
    wanted = False
    for line in page.read_text("utf-8").splitlines():
        fence = FENCE.match(line)
        if fence is None:
            if block is not None:
                block.append(line)
        elif block is None:
            block, wanted = [], fence[1] == language
        else:
            if wanted:
                yield block
            block = None
    assert block is None, f"{page} has a block without an end"


def commands(page: Path) -> list[str]:
    """The rlflame commands that need no cluster, in order, without comments."""
    return [
        line
        for block in blocks(page)
        if not any("FLAME_ENDPOINT" in line or "docker" in line for line in block)
        for line in block
        if line.startswith("rlflame ")
    ]


def small(config: RunConfig) -> RunConfig:
    """The config with a budget of seconds."""
    learning = config.learning
    if learning.rollout.unit == "episodes":
        rollout = learning.rollout.model_copy(update={"num_slots": 2, "envs_per_slot": 2})
    else:
        rollout = learning.rollout.model_copy(update={"steps": 8})
    return config.model_copy(
        update={
            "stop_at_steps": None if config.stop_at_iterations else STEPS,
            "stop_at_iterations": ITERATIONS if config.stop_at_iterations else None,
            "learning": learning.model_copy(update={"rollout": rollout}),
            "evaluation": config.evaluation.model_copy(
                update={"final_episodes": 3, "episodes": 2, "max_episode_steps": 50}
            ),
        }
    )


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, extended = config_resolve.resolve, experiment_resume.extend_budget

    def resolved(*words: Any) -> tuple[RunConfig, str]:
        config, name = resolve(*words)
        return small(config), name

    def extended_little(found: Any, budget: Budget | None, policy: Path) -> Any:
        if budget is not None and budget.end > 10 * STEPS:  # that of a page, not of a short job
            budget = Budget("steps", found.progress.steps + STEPS)
        return extended(found, budget, policy)

    make_benchmark = Benchmark.__init__

    def made(self: Any, cases: Any, fleets: Any, counts: Any, repeat: int, **words: Any) -> None:
        make_benchmark(self, cases[:1], fleets, counts[:1], 1)
        self.seconds, self.has_limits = 0.0, True

    monkeypatch.setattr(Benchmark, "__init__", made)
    monkeypatch.setattr(RolloutsBenchmark, "__init__", made)
    monkeypatch.setattr(config_resolve, "resolve", resolved)
    monkeypatch.setattr(experiment_resume, "extend_budget", extended_little)

    def resumed_little(folder: Path, runtime: Any, *, steps: int | None, **words: Any) -> Any:
        """Processes of seeds do not have the patch and get their budget from the job."""
        return resume(folder, runtime, steps=None if steps is None else 3 * STEPS, **words)

    def two(config: RunConfig, seeds: Any, **words: Any) -> Any:
        """A job of two seeds, in a folder with the name for all of them."""
        learning = config.learning
        name = f"{make_short_name(learning.environment.id)}-{learning.algorithm}"
        out = config.runtime.out or f"runs/{name}-{format_folder_name(seeds)}"
        runtime = config.runtime.model_copy(update={"out": out})
        return train(config.model_copy(update={"runtime": runtime}), seeds[:2], **words)

    make_job = policy_render.make_job

    def make_short_job(*words: Any) -> Any:
        """The shipped policies are drawn for a few steps, too."""
        return replace(make_job(*words), max_episode_steps=50)

    monkeypatch.setattr(policy_render, "make_job", make_short_job)
    train, resume = sweep_run.train, sweep_run.resume
    monkeypatch.setattr(sweep_run, "train", two)
    monkeypatch.setattr(sweep_run, "resume", resumed_little)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up the current folder like a clone, as far as the pages need it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    if (ROOT / "checkpoints").exists():
        shutil.copytree(ROOT / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def test_the_commands_of_the_readme_work_as_they_stand(short: None, reader: Path) -> None:
    lines = commands(ROOT / "README.md")
    assert len(lines) > 12
    for line in lines:
        prepare(line, reader)
        obey(line)


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("start.md", 11),
        ("guides/training.md", 13),
        ("guides/seeds.md", 6),
        ("guides/environments.md", 7),
    ],
)
def test_the_commands_of_a_page_work_as_they_stand(
    page: str, count: int, short: None, reader: Path
) -> None:
    for code in python_of(page):
        if code.startswith("# my_env.py"):
            (reader / "my_env.py").write_text(code)
    lines = commands(DOCS / page)
    assert len(lines) == count
    path = [*sys.path]
    for line in lines:
        obey(line)
        # Each command is a new process, without the environments of previous commands.
        sys.path[:] = path
        sys.modules.pop("my_env", None)
        gymnasium.registry.pop("Target-v0", None)


def test_the_python_of_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    """The script has only a tenth of the steps and a fifth of the seeds."""
    scripts = [code for code in python_of("guides/python.md") if "import api" in code]
    assert len(scripts) == 2
    for code in scripts:
        short = code.replace("20000", "2048").replace("range(10)", "range(2)")
        (tmp_path / "code.py").write_text(short.replace("episodes=100", "episodes=3"))
        ended = subprocess.run(
            [sys.executable, "code.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout


def python_of(page: str) -> list[str]:
    return ["\n".join([*block, ""]) for block in blocks(DOCS / page, "python")]


def obey(line: str) -> None:
    """Run one line as a shell would."""
    words = shlex.split(line, comments=True)
    out = Path(words[words.index(">") + 1]) if ">" in words else None
    spoken = rlflame(*words[1 : words.index(">") if out else len(words)])
    # A check may fail for a policy that was trained for a few steps.
    gated = {"--min-return", "--require", "--vs"} & set(words)
    assert spoken.code == 0 or (gated and spoken.code == 1), f"{line}\n{spoken.out}{spoken.err}"
    if out is not None:
        out.write_text(spoken.out)


def prepare(line: str, folder: Path) -> None:
    """Create the files that a line expects."""
    best = folder / "runs" / "hopper-ppo-0" / "best.safetensors"
    for name in ("a.safetensors", "b.safetensors"):
        if name in line and not (folder / name).exists():
            shutil.copy(best, folder / name)
    for name in ("new", "old"):
        if f" {name} " in line and not (folder / name).exists():
            shutil.copytree(folder / "runs" / "hopper-ppo-0", folder / name / "hopper-ppo-0")


PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md"), *ROOT.glob("*/README.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_between_the_pages_leads_somewhere() -> None:
    missing = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert not missing


def test_the_index_links_every_page() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (DOCS / "index.md").read_text("utf-8"))
    pages = {path.resolve() for path in DOCS.rglob("*.md")} - {DOCS / "index.md"}
    assert pages <= {(DOCS / link).resolve() for link in links}
