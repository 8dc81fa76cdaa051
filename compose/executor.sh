#!/bin/sh
# Starts the executor manager, late if it has run in this container before: one that is back before
# the session manager has given its node up (30 s) is handed executors whose processes are gone,
# and then no run gets a new executor any more.
set -eu
if [ -e /run/rlflame-started ]; then
    echo "back too soon to be new: waiting 40 s, until the session manager has let this node go"
    sleep 40
fi
: > /run/rlflame-started
exec /usr/local/flame/bin/flame-executor-manager "$@"
