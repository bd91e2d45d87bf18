"""Warnings that point at the user's own line, however deep in Twinkle they arise."""

import sys
import warnings

_OWN = ("twinkle", "twinkle_core", "twinkle_client")


def warn(message: str) -> None:
    """Show a `UserWarning` at the line outside of Twinkle's packages that led to it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
