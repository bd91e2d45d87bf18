"""How errors look on a terminal: one line, and where in the user's own code it happened. Every frame with `--debug`."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from twinkle_core import settings
from twinkle_core.errors import TwinkleError

_OWN = ("twinkle", "twinkle_core", "twinkle_client")


def report_error(error: BaseException, where: str) -> None:
    """Print an error that ends the run: what the core does in the hook `twinkle_report_error`.

    A `TwinkleError` is its message with its notes, and the line of the script that led to it. Anything else is the traceback that
    `python SCRIPT` would have printed.
    """
    if settings.debug():
        print(f"In {where}:", file=sys.stderr)
        traceback.print_exception(error)
        return
    frames = _script_frames(error.__traceback__)
    if frames is None and not isinstance(error, (TwinkleError, SyntaxError)):  # nothing of the script is on the way to it
        frames = error.__traceback__
    if not isinstance(error, TwinkleError):
        whole = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames), frames)  # the script may have set its own
        error.__traceback__ = whole
        return
    print_error(type(error).__name__, str(error))
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    frame = _last_own_frame(frames)
    if frame is not None:
        print("".join(traceback.format_list([frame])), end="", file=sys.stderr)


def print_error(what: str, message: str) -> None:
    """Print "what: message" to stderr, the first word in red on a terminal."""
    if sys.stderr.isatty():
        what = f"\033[1;31m{what}\033[0m"
    print(f"{what}: {message}", file=sys.stderr)


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's own first frame on; None if its code never ran."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") != "__main__":
        frames = frames.tb_next
    return frames


def _last_own_frame(frames: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the deepest frame of the script or of a module beside it: where the user can change something."""
    if frames is None:
        return None
    folder = Path(frames.tb_frame.f_code.co_filename).parent
    last = frames
    tail: TracebackType | None = frames
    while tail is not None:
        path = Path(tail.tb_frame.f_code.co_filename)
        package = str(tail.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if path.is_relative_to(folder) and "site-packages" not in path.parts and package not in _OWN:
            last = tail
        tail = tail.tb_next
    return traceback.extract_tb(last, limit=1)[0]
