"""Opens an image in the viewer of the desktop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlflame.console.output import is_interactive


def open_image(image: Path) -> bool:
    """Open an image in a window; return whether there is a display for it.

    A script or a pipe opens no window, and neither does a session without a display.
    """
    from rlflame.rendering.policy_render import has_display

    viewer = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if viewer is None or not is_interactive(sys.stdout) or not has_display(os.environ):
        return False
    silence = subprocess.DEVNULL
    subprocess.Popen(  # the viewer stays open after the command
        [viewer, str(image.absolute())],
        stdin=silence,
        stdout=silence,
        stderr=silence,
        start_new_session=True,
    )
    return True
