"""Starts Flame's executor manager when the previous node has been removed.

The session manager removes a stopped node after 30 s. A node that returns earlier gets executors
whose processes no longer exist, and runs get no new executors. This script does not depend on runs.
"""

import os
import socket
import subprocess
import sys
import time

HOME = os.environ.get("FLAME_HOME", "/usr/local/flame")
MANAGER = f"{HOME}/bin/flame-executor-manager"
CONFIG = "/root/.flame/flame-cluster.yaml"
NOT_READY = 2
#: A session manager notices within 15 s that a node is gone and waits another 30 s, unless it was
#: away itself: then it does neither.
GIVEN_UP_S = 50.0
VISIT_S = 5.0
DEADLINE_S = 180.0
sys.path.append(f"{HOME}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")


def standing(name: str) -> int:
    """Return the session manager's state of this node, or NOT_READY if it is unknown."""
    import flamepy
    import yaml
    from flamepy.core.types import FlameClientTls

    with open(CONFIG) as file:
        cluster = yaml.safe_load(file)["cluster"]
    tls = cluster.get("tls")
    connection = flamepy.connect(
        cluster["endpoint"], FlameClientTls(ca_file=tls["ca_file"]) if tls else None
    )
    try:
        nodes = {node.metadata.name: int(node.status.state) for node in connection.list_nodes()}
    finally:
        connection.close()
    return nodes.get(name, NOT_READY)


def visit() -> None:
    """Run the manager briefly: the loss of a node is noticed only if it was there."""
    manager = subprocess.Popen([MANAGER, *sys.argv[1:]], stdout=subprocess.DEVNULL)
    time.sleep(VISIT_S)
    manager.terminate()
    manager.wait()


def wait(name: str) -> None:
    began = seen = time.monotonic()
    said = ""
    while time.monotonic() - began < DEADLINE_S:
        try:
            if standing(name) == NOT_READY:
                return
            reason = f"until the session manager has given up the {name} of before (30 s)"
        except Exception as error:  # whatever it is, the executor manager will say it better
            seen = time.monotonic()
            reason = f"for the session manager ({type(error).__name__}: {error})"
        if reason != said:
            print(f"waiting {reason}", flush=True)
            said = reason
        if time.monotonic() - seen > GIVEN_UP_S:
            visit()
            seen = time.monotonic()
        time.sleep(2.0)


if __name__ == "__main__":
    wait(socket.gethostname())
    os.execv(MANAGER, [MANAGER, *sys.argv[1:]])
