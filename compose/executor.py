"""Starts Flame's executor manager once the session manager has let go of this node's past.

A node that is back within the 30 s that the session manager gives it is handed executors whose
processes are gone, and then no run gets a new executor any more. Must not know: anything of runs.
"""

import os
import socket
import sys
import time

HOME = os.environ.get("FLAME_HOME", "/usr/local/flame")
CONFIG = "/root/.flame/flame-cluster.yaml"
NOT_READY = 2
DEADLINE_S = 60.0
sys.path.append(f"{HOME}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")


def past_is_over(config: str, name: str) -> bool:
    """Whether the session manager counts on nothing of this node: it does not know it, has given it
    up, or has no executor there."""
    import flamepy
    import yaml
    from flamepy.core.types import FlameClientTls

    with open(config) as file:
        cluster = yaml.safe_load(file)["cluster"]
    tls = cluster.get("tls")
    connection = flamepy.connect(
        cluster["endpoint"], FlameClientTls(ca_file=tls["ca_file"]) if tls else None
    )
    try:
        known = {node.metadata.name: node.status.state for node in connection.list_nodes()}
        executors = [one for one in connection.list_executors() if one.spec.node == name]
    finally:
        connection.close()
    return known.get(name, NOT_READY) == NOT_READY or not executors


def main() -> None:
    name, deadline, said = socket.gethostname(), time.monotonic() + DEADLINE_S, False
    while time.monotonic() < deadline:
        try:
            if past_is_over(CONFIG, name):
                break
            reason = f"the session manager still counts on the executors {name} had"
        except Exception as error:  # whatever it is, the executor manager will say it better
            reason = f"{type(error).__name__}: {error}"
        if not said:
            print(f"waiting: {reason}", flush=True)
            said = True
        time.sleep(2.0)
    manager = f"{HOME}/bin/flame-executor-manager"
    os.execv(manager, [manager, *sys.argv[1:]])


if __name__ == "__main__":
    main()
