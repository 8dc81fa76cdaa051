"""An unusable cluster at the start of a run: the error, its place, and the hint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, FleetUnreachableError, RlflameError
from rlflame.fleet.factory import make_fleet
from rlflame.fleet.flame.client import FlameClient
from rlflame.fleet.flame.timed_call import format_error

NOBODY = "127.0.0.1:9"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE", "FLAME_CACHE_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def listener() -> Iterator[str]:
    """A port that accepts connections."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield f"127.0.0.1:{found.getsockname()[1]}"


def refused() -> RlflameError:
    with pytest.raises(RlflameError) as caught:
        make_fleet(RuntimeSettings(fleet="flame", workers=1), 1).close()
    return caught.value


def write_file(home: Path, text: str) -> Path:
    path = home / ".flame" / "flame.yaml"
    path.parent.mkdir()
    path.write_text(text)
    return path


def laid_out(endpoint: str, cache: str) -> str:
    lines = f"  cluster: {{endpoint: '{endpoint}'}}\n"
    lines += f"  cache: {{endpoint: '{cache}'}}\n" if cache else ""
    return f"current-context: a\ncontexts:\n- name: a\n{lines}"


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://somewhere:notaport",
        "http://somewhere:99999",
        "http://somewhere:0",
        "http://[::1",
        "ftp://somewhere:8080",
        "grpc://somewhere:8080",
        "somewhere:8080",
        "http://:8080",
    ],
)
def test_an_address_that_is_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("FLAME_ENDPOINT", endpoint)
    error = refused()
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert f"{endpoint!r} from FLAME_ENDPOINT" in error.message
    suggestion = "http://HOST:8080" if "://" in endpoint else "http://somewhere:8080"
    assert error.hint == f"export FLAME_ENDPOINT={suggestion}"


@pytest.mark.parametrize(
    ("cache", "suggestion"),
    [
        ("somewhere:9090", "grpc://somewhere:9090"),
        ("http://somewhere:9090", "grpc://HOST:9090"),
        ("grpc://somewhere:x", "grpc://HOST:9090"),
    ],
)
def test_a_cache_s_address_that_is_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, cache: str, suggestion: str
) -> None:
    monkeypatch.setenv("FLAME_ENDPOINT", "http://somewhere:8080")
    monkeypatch.setenv("FLAME_CACHE_ENDPOINT", cache)
    error = refused()
    assert isinstance(error, ConfigError)
    assert f"{cache!r} from FLAME_CACHE_ENDPOINT" in error.message
    assert error.hint == f"export FLAME_CACHE_ENDPOINT={suggestion}"


def test_a_host_that_is_no_name_is_not_reached(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAME_ENDPOINT", "http://some..where:8080")
    error = refused()
    assert isinstance(error, FleetUnreachableError)
    assert "http://some..where:8080" in error.message


def test_a_dead_cache_is_looked_for_where_it_is_configured(
    home: Path, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    monkeypatch.setenv("FLAME_ENDPOINT", f"http://{listener}")
    monkeypatch.setattr("flamepy.core.types.DEFAULT_FLAME_CACHE_ENDPOINT", f"grpc://{NOBODY}")
    by_default = refused()
    assert isinstance(by_default, FleetUnreachableError)
    assert f"The object cache does not answer at grpc://{NOBODY}" in by_default.message
    assert "flamepy's default, because FLAME_CACHE_ENDPOINT is not set." in by_default.message
    assert "export FLAME_CACHE_ENDPOINT=grpc://HOST:9090" in by_default.hint

    path = write_file(home, laid_out("http://elsewhere:1", f"grpc://{NOBODY}"))
    assert f"comes from {path}." in refused().message

    monkeypatch.setenv("FLAME_CACHE_ENDPOINT", f"grpc://{NOBODY}")
    assert "comes from FLAME_CACHE_ENDPOINT." in refused().message


def test_an_endpoint_from_the_file_is_attributed_to_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(home, laid_out(f"http://{NOBODY}", ""))
    monkeypatch.setenv("FLAME_CACHE_ENDPOINT", "grpc://somewhere:9090")
    assert f"The address comes from {path}" in refused().message


class Web(BaseHTTPRequestHandler):
    def log_message(self, *said: object) -> None:
        pass


def test_a_web_server_is_no_session_manager(
    home: Path, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}"
        monkeypatch.setenv("FLAME_ENDPOINT", address)
        monkeypatch.setenv("FLAME_CACHE_ENDPOINT", f"grpc://{listener}")
        monkeypatch.setattr("rlflame.fleet.flame.client._CONNECT_S", 1.0)
        error = refused()
        web.shutdown()
    assert isinstance(error, FleetUnreachableError)
    assert error.exit_code == 3
    assert f"{address} does not answer as a session manager" in error.message
    assert "comes from FLAME_ENDPOINT" in error.message
    assert "8080, not 8081" in error.hint


def test_one_that_connects_and_refuses_the_first_question(
    home: Path, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    """The session manager has another port that behaves like this."""

    class Connection:
        closed = False
        _frontend = SimpleNamespace(CreateTask=print, GetTask=print)

        def list_nodes(self) -> list[object]:
            raise RuntimeError("Method not found")

        def close(self) -> None:
            self.closed = True

    connection = Connection()
    monkeypatch.setenv("FLAME_ENDPOINT", f"http://{listener}")
    monkeypatch.setenv("FLAME_CACHE_ENDPOINT", f"grpc://{listener}")
    monkeypatch.setattr("flamepy.connect", lambda endpoint, tls: connection)
    with pytest.raises(
        FleetUnreachableError, match="does not answer as a session manager"
    ) as caught:
        FlameClient().open()
    assert "Method not found" in caught.value.detail
    assert connection.closed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("# later\n---\n", "it is empty"),
        ("- a\n- b\n", "it is empty, or does not have"),
        (
            "current-context: a\ncontexts:\n- cluster: {}\n",
            "it is empty, or does not have",
        ),
        ("a: b: c\n", "line 1"),
        ("contexts: []\n", "current-context is not set"),
    ],
)
def test_a_broken_file_is_named_though_the_variables_would_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    path = write_file(home, text)
    monkeypatch.setenv("FLAME_ENDPOINT", f"http://{NOBODY}")
    error = refused()
    assert isinstance(error, ConfigError)
    assert error.message.startswith(f"{path} cannot be read: ")
    assert words in error.message
    assert f"mv {path} " in error.hint


def run(*words: str, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    code += "\nimport sys\nfrom rlflame.__main__ import main\nsys.exit(main())\n"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )


TRAIN = ("train", "--env", "cartpole", "--fleet", "flame", "--steps", "100")


def test_without_a_cluster_the_error_shows_how_to_start_one(home: Path) -> None:
    """rlflame does not try flamepy's default address."""
    found = run(*TRAIN, "--out", str(home / "run"))
    assert found.returncode == 3
    assert "No Flame cluster is configured" in found.stderr
    assert "--local" in found.stderr
    assert "up -d" in found.stderr
    assert "export FLAME_ENDPOINT=" in found.stderr


#: Importing a module that is None in sys.modules fails.
WITHOUT = "import sys\nsys.modules['flamepy'] = None\n"


@pytest.mark.parametrize("words", [(*TRAIN, "--out", "run"), ("cluster-check",)])
def test_without_flamepy(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(home)
    found = run(*words, code=WITHOUT, FLAME_ENDPOINT=f"http://{NOBODY}")
    said = found.stdout + found.stderr
    assert found.returncode == (3 if words == ("cluster-check",) else 2)
    assert "flamepy is not installed" in said
    assert "pip install 'flamepy" in said
    assert "cannot be read" not in said
    assert "Traceback" not in said


def test_a_repeated_message_of_arrow_is_shown_once() -> None:
    """pyarrow repeats this text if nothing listens on the port."""
    flight = pytest.importorskip("pyarrow.flight")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen on the port
        client = flight.FlightClient(f"grpc://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(flight.FlightUnavailableError) as caught:
            client.do_get(flight.Ticket(b"a/b/c:0")).read_all()
    assert "gRPC client debug context" in str(caught.value)
    assert format_error(caught.value).startswith("Flight returned unavailable error")
    assert format_error(caught.value).count("failed to connect to all addresses") == 1
