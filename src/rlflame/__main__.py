"""The command itself, as `rlflame` and as `python -m rlflame`.

Loading what follows takes a moment in which Ctrl-C ends the process without a word, because
nothing has begun yet.
"""

import signal


def main() -> None:
    begun_in_front = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if begun_in_front:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlflame.cli import main as command

    if begun_in_front:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
