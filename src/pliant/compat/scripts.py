"""Other people's scripts, run inside this process."""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def script(path: str | os.PathLike[str], argv: Sequence[str] = ()) -> Iterator[Callable[[], None]]:
    """Gives what runs the script as `python path argv...` would; its arguments and its folder are
    in place already.
    """
    before, folder = sys.argv, os.path.dirname(os.path.abspath(path))
    sys.argv = [os.fspath(path), *argv]
    sys.path.insert(0, folder)

    def run() -> None:
        runpy.run_path(os.path.abspath(path), run_name="__main__")

    try:
        yield run
    finally:
        sys.argv = before
        with contextlib.suppress(ValueError):  # the script may have taken it out itself
            sys.path.remove(folder)
