"""The entry point for `rlflame` and `python -m rlflame`.

Ctrl-C during the imports ends the process without a message, because no work has started yet.
"""

from rlflame.rollout.search_path import remove_current_folder

remove_current_folder()  # before another import can pick up a file from there

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
    # Workers load only the code that this command names, not code named by inherited variables.
    for name in (user_code.FILE_VARIABLE, user_code.FOLDER_VARIABLE):
        os.environ.pop(name, None)
    with contextlib.ExitStack() as stack:
        head_start = None
        if sys.argv[1:2] == ["train"]:  # other commands save the time of this import
            from rlflame.fleet.prestart import PrestartPool

            head_start = stack.enter_context(PrestartPool.from_arguments(sys.argv[2:]))
        from rlflame.cli.app import main as command

        if in_foreground:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(head_start)


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise, the next file that is opened would get the descriptor of a standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
