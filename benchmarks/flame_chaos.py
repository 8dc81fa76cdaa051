"""Kill workers of a run on Flame, and compare it with an undisturbed run.

    python benchmarks/flame_chaos.py --kills 20
    python benchmarks/flame_chaos.py --kills 10 --bounce "systemctl restart flame-object-cache"

At random moments, the script sends SIGKILL to the service of an executor or to its child process,
which steps the environments. It runs each --bounce command once, between two kills. The executors
must run on this machine, so that the script can signal their processes. At the end, the script
prints the number of retries and both digests.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from script import ended, positive

from rlflame import api
from rlflame.config import resolve
from rlflame.config.flags import TrainFlags
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.flame.fleet import FlameFleet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--steps", type=positive, default=300_000)
    parser.add_argument("--kills", type=positive, default=20)
    parser.add_argument(
        "--every", type=float, default=2.0, help="mean number of seconds between kills"
    )
    parser.add_argument("--bounce", action="append", default=[], metavar="COMMAND")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peaceful = train(options, Path(folder) / "peaceful", None)
        told: Counter[str] = Counter()

        def observe(event: FleetEvent) -> None:
            told[event.kind] += 1
            if event.kind in ("note", "retried") and event.text:
                print(f"  {event.kind}: {event.text[:120]}", flush=True)

        with FlameFleet(None, RuntimeSettings(workers=2), observer=observe) as fleet:
            over = threading.Event()
            wild = threading.Thread(target=rampage, args=(fleet, options, over), daemon=True)
            wild.start()
            began = time.monotonic()
            hunted = train(options, Path(folder) / "hunted", fleet)
            over.set()
            wild.join()
            print(f"ended after {time.monotonic() - began:.0f} s: {told['retried']} retried, "
                  f"{told['speculated']} speculated")  # fmt: skip
    print(f"undisturbed {peaceful}\nkilled      {hunted}")
    print("identical digests" if peaceful == hunted else "DIFFERENT")
    return int(peaceful != hunted)


def train(options: argparse.Namespace, out: Path, fleet: FlameFleet | None) -> str:
    flags = TrainFlags(
        env=options.env, algo=options.algo, steps=options.steps, out=out, local=fleet is None
    )
    config, _ = resolve.resolve(flags, components.has_continuous_actions)
    return api.train(config, fleet=fleet).digest


def rampage(fleet: FlameFleet, options: argparse.Namespace, over: threading.Event) -> None:
    chosen = random.Random(options.seed)
    fleet.probe()
    acts: list[str] = ["kill"] * options.kills
    for command in options.bounce:
        acts.insert(chosen.randrange(1, len(acts) + 1), command)
    for act in acts:
        if over.wait(chosen.expovariate(1.0 / options.every)):
            print("  the run finished before all kills", flush=True)
            return
        if act != "kill":
            print(f"  bounced: {act}", flush=True)
            subprocess.run(act, shell=True, check=True)
            continue
        workers = [worker for worker in fleet.probe() if "child" in worker]
        if workers:
            victim = chosen.choice(workers[-2:])
            what = chosen.choice(["child", "child", "pid"])
            if not int(victim[what]):
                # The service has no child process at the moment. os.kill(0) would kill this script.
                what = "pid"
            try:
                os.kill(int(victim[what]), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
            print(f"  killed the {'child' if what == 'child' else 'service'} {victim[what]}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    ended(main)
