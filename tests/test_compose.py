"""The Compose files: settings that keep a cluster private and running."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).resolve().parent.parent
COMPOSE = REPOSITORY / "compose"
FILES = ("compose.yaml", "tls.yaml", "head.yaml", "node.yaml")
FLAME = "v0.6.0"
#: The folder that the published images use, regardless of HOME.
CONFIG = "/root/.flame/flame-cluster.yaml"
EXECUTORS = ("executor-1", "executor-2", "executor-3")


def load(name: str) -> dict[str, Any]:
    """Load a file with default variables. A required one has its name as its value."""
    text = (COMPOSE / name).read_text()
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
    text = re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", r"\1", text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(name)["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The mounts of a service, as {target: source}."""
    parts = [entry.split(":") for entry in service.get("volumes", ())]
    return {target: source for source, target, *_ in parts}


@pytest.mark.parametrize("name", FILES)
def test_ports_are_open_to_this_machine_alone(name: str) -> None:
    for service in services(name).values():
        for port in service.get("ports", ()):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


def test_both_ports_can_be_moved() -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    assert "127.0.0.1:${RLFLAME_FLAME_PORT:-8080}:8080" in text
    assert "127.0.0.1:${RLFLAME_CACHE_PORT:-9090}:9090" in text


def test_only_the_head_of_several_machines_listens_on_their_network() -> None:
    for name in FILES:
        for service in services(name).values():
            assert ("network_mode" in service) == (name == "head.yaml")


@pytest.mark.parametrize("name", FILES)
def test_images_are_of_one_version(name: str) -> None:
    images = [service["image"] for service in services(name).values() if "image" in service]
    assert all(image.endswith(":" + FLAME) for image in images), images
    for dockerfile in COMPOSE.glob("*Dockerfile"):
        bases = re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
        assert bases == [f"docker.io/xflops/flame-executor-manager:{FLAME}"]


def test_one_session_manager_one_cache_and_three_executor_managers() -> None:
    found = services("compose.yaml")
    images = [service["image"].rsplit("/", 1)[-1] for service in found.values()]
    assert images.count(f"flame-session-manager:{FLAME}") == 1
    assert images.count(f"flame-object-cache:{FLAME}") == 1
    assert [name for name in found if re.fullmatch(r"executor-\d+", name)] == list(EXECUTORS)
    assert found["executor"]["deploy"]["replicas"] == 0
    assert "console" in found


def test_every_lasting_node_has_a_name_of_its_own() -> None:
    found = services("compose.yaml")
    names = [found[name]["hostname"] for name in EXECUTORS]
    assert names == list(EXECUTORS)
    assert "hostname" not in found["executor"], "copies of one service cannot share a name"
    assert "RLFLAME_NODE:?" in (COMPOSE / "node.yaml").read_text()


@pytest.mark.parametrize("name", ["compose.yaml", "head.yaml", "node.yaml"])
def test_everything_starts_again_however_it_ended(name: str) -> None:
    for service in services(name).values():
        assert service["restart"] == "unless-stopped"  # a session manager fails with status 0
        assert service["init"] is True


@pytest.mark.parametrize("name", ["compose.yaml", "head.yaml", "node.yaml"])
def test_what_runs_flame_is_watched_and_held_in(name: str) -> None:
    for title, service in services(name).items():
        if title == "console":
            continue
        assert service["healthcheck"]["test"][0] == "CMD-SHELL"
        assert service["cap_drop"] == ["ALL"]
        assert service["logging"]["options"]["max-size"]
        assert any("logs:size=" in place for place in service["tmpfs"])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("compose.yaml", "flame-cluster.yaml"),
        ("tls.yaml", "flame-cluster.tls.yaml"),
        ("head.yaml", "flame-cluster.tls.yaml"),
        ("node.yaml", "flame-cluster.tls.yaml"),
    ],
)
def test_the_cluster_config_lies_where_the_images_look(name: str, config: str) -> None:
    for title, service in services(name).items():
        if title != "console":
            assert mounts(service)[CONFIG] == f"./{config}"
    assert (COMPOSE / config).is_file()


def test_executors_wait_for_what_they_cannot_start_without() -> None:
    for name in (*EXECUTORS, "executor"):
        needs = services("compose.yaml")[name]["depends_on"]
        assert needs["session-manager"]["condition"] == "service_healthy"


@pytest.mark.parametrize("config", ["flame-cluster.yaml", "flame-cluster.tls.yaml"])
def test_the_cluster_config_is_one_that_every_version_works_with(config: str) -> None:
    """v0.6.0 needs the policy gang, and later versions refuse it: each default list is right."""
    found = load(config)
    assert "policies" not in found["cluster"]
    assert found["cluster"]["storage"].startswith("fs:///")
    assert found["cache"]["storage"].startswith("/")
    secure = "tls" in config
    assert found["cluster"]["endpoint"] == f"http{'s' * secure}://session-manager:8080"
    assert found["cache"]["endpoint"] == f"grpc{'s' * secure}://object-cache:9090"
    assert ("tls" in found["cluster"]) == ("tls" in found["cache"]) == secure


def test_the_two_cluster_configs_differ_in_encryption_alone() -> None:
    plain, secure = load("flame-cluster.yaml"), load("flame-cluster.tls.yaml")
    for half in ("cluster", "cache"):
        del secure[half]["tls"]
        secure[half]["endpoint"] = plain[half]["endpoint"]
    assert secure == plain


@pytest.mark.parametrize("name", ["compose.yaml", "head.yaml"])
def test_what_is_stored_outlives_containers(name: str) -> None:
    config, found, kept = load("flame-cluster.yaml"), services(name), load(name)["volumes"]
    assert mounts(found["object-cache"])[config["cache"]["storage"]] in kept
    state = config["cluster"]["storage"].removeprefix("fs://")
    places = [place for place in mounts(found["session-manager"]) if place.startswith(state)]
    assert all(mounts(found["session-manager"])[place] in kept for place in places)
    if name == "compose.yaml":  # `down` removes all nodes, so the session manager must forget them
        assert places == [f"{state}/sessions", f"{state}/applications"]
    else:
        assert places == [state]


def test_the_cache_keeps_its_address() -> None:
    found = load("compose.yaml")
    address = found["services"]["object-cache"]["networks"]["flame"]["ipv4_address"]
    (subnet,) = found["networks"]["flame"]["ipam"]["config"]
    assert address.rsplit(".", 1)[0] + ".0/24" == subnet["subnet"]
    assert f"$network.{address.rsplit('.', 1)[1]}" in (COMPOSE / "certificates.sh").read_text()


def test_servers_alone_see_the_key() -> None:
    for title, service in itertools.chain(
        services("tls.yaml").items(), services("node.yaml").items()
    ):
        sources = set(mounts(service).values())
        server = title in ("session-manager", "object-cache")
        assert ("./certificates" in sources) == server
        assert ("./certificates/ca.crt" in sources) != server


def test_encryption_covers_every_service() -> None:
    assert set(services("tls.yaml")) == set(services("compose.yaml"))


def test_versions_are_those_of_the_constraints() -> None:
    for dockerfile in COMPOSE.glob("*Dockerfile"):
        text = dockerfile.read_text()
        assert not re.search(r"[\w\]]\s*(==|>=|<=|~=)\s*\d", text), "a version typed a second time"
        installs = re.findall(r"pip install[^\n]*", text)
        assert installs
        assert all(re.search(r"--constraints \S+/constraints\.txt", line) for line in installs)
        assert re.search(r"^COPY (.* )?constraints\.txt ", text, re.MULTILINE)


def test_executors_never_get_torch() -> None:
    text = (COMPOSE / "executor.Dockerfile").read_text()
    installed = [line for line in text.splitlines() if "$install " in line]
    assert installed
    assert not any("torch" in line or "rlflame" in line for line in installed)
    assert 'test ! -e "$site/torch"' in text


def test_what_the_images_are_built_from_is_sent() -> None:
    sent = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for dockerfile in COMPOSE.glob("*Dockerfile"):
        for sources in re.findall(r"^COPY (.+) \S+$", dockerfile.read_text(), re.MULTILINE):
            for source in sources.split():
                assert "!" + source in sent
                assert (REPOSITORY / source).exists()


def test_every_variable_is_listed_with_its_default() -> None:
    listed = dict(
        re.findall(r"^#(RLFLAME_\w+)=(\S+)", (COMPOSE / ".env").read_text(), re.MULTILINE)
    )
    text = (COMPOSE / "compose.yaml").read_text()
    assert dict(re.findall(r"\$\{(RLFLAME_\w+):-([^}]*)\}", text)) == listed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_name_all_by_which_servers_are_called(tmp_path: Path) -> None:
    script = shutil.copy(COMPOSE / "certificates.sh", tmp_path)
    environment = {**os.environ, "RLFLAME_NETWORK": "10.9.8"}
    for _ in range(2):  # the second time over the existing files
        subprocess.run(
            ["sh", script, "cluster.example.org", "10.0.0.5"], env=environment, check=True
        )
    folder = tmp_path / "certificates"
    assert sorted(os.listdir(folder)) == ["ca.crt", "server.crt", "server.key"]
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    for kind, name in (
        ("hostname", "session-manager"),
        ("hostname", "object-cache"),
        ("hostname", "localhost"),
        ("hostname", "cluster.example.org"),
        ("ip", "127.0.0.1"),
        ("ip", "10.9.8.10"),
        ("ip", "10.0.0.5"),
    ):
        subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", f"-verify_{kind}", name,
             "-CAfile", folder / "ca.crt", folder / "server.crt"],
            check=True,
        )  # fmt: skip
    wrong = ["openssl", "verify", "-verify_ip", "10.0.0.6", "-CAfile", folder / "ca.crt"]
    assert subprocess.run([*wrong, folder / "server.crt"], check=False).returncode != 0
