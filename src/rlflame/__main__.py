"""The command itself, as `rlflame` and as `python -m rlflame`.

While its parts load, Ctrl-C ends the process without a message, because nothing has started yet.
"""

from rlflame.rollout.search_path import remove_current_folder

remove_current_folder()  # before any other import could find a file that lies there

import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from rlflame.rollout.envs import user_code  # noqa: E402


def main() -> None:
    in_foreground = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if in_foreground:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_streams()
    # Only this command says what workers load.
    for name in (user_code.FILE_VARIABLE, user_code.FOLDER_VARIABLE):
        os.environ.pop(name, None)
    with contextlib.ExitStack() as stack:
        head_start = None
        if sys.argv[1:2] == ["train"]:  # no other command loads what this needs
            from rlflame.fleet.prestart import PrestartPool

            head_start = stack.enter_context(PrestartPool.from_arguments(sys.argv[2:]))
        from rlflame.cli.app import main as command

        if in_foreground:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(head_start)


def _open_standard_streams() -> None:
    """A closed one would lend its number to the next file or pipe that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
