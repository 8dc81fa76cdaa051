"""The script that tests environments: how it finds them, and how it reads messages."""

from __future__ import annotations

from environments import PACKAGES, Case, find_id, find_message, trust

IDS = ["FetchReach-v1", "FetchReach-v4", "FetchReachDense-v4", "MiniGrid-Unlock-v0", "Unlock-v0x"]


def test_a_name_is_the_newest_version_of_an_environment() -> None:
    assert find_id("FetchReach", IDS) == "FetchReach-v4"
    assert find_id("Unlock-v0", IDS) == "MiniGrid-Unlock-v0"
    assert find_id("FetchReach-v1", IDS) == "FetchReach-v1"
    assert find_id("Absent-v0", IDS) == "Absent-v0"


def test_a_message_is_the_error_of_rlflame_with_its_hint() -> None:
    text = "a note\nrlflame: It is refused.\n  hint: --algo ppo\nmore\n"
    assert find_message(text) == "It is refused. hint: --algo ppo"
    assert find_message("rlflame: It is refused.\n") == "It is refused."
    assert find_message("Traceback\n\nValueError: no\n") == "ValueError: no"
    assert find_message("") == ""


def test_options_become_arguments_of_the_constructor() -> None:
    package = next(package for package in PACKAGES if package.name == "MinAtar")
    options = ("--env-kwargs", "game=breakout", "--env-kwargs", "use_minimal_action_set=true")
    case = Case(package, "MinAtar/Breakout-v1", options)
    assert case.train_options[:2] == ["--env", "minatar.gym:BaseEnv"]
    assert trust(case) == ["--allow-module", "minatar.gym"]
    wrapped = Case(package, "MinAtar/Breakout-v1", ("--wrap", "gymnasium.wrappers:X"))
    assert trust(wrapped)[2:] == ["--allow-module", "gymnasium.wrappers"]
    assert case.kwargs == {"game": "breakout", "use_minimal_action_set": True}
