"""Components that a launcher creates, wherever they live, and the methods it can call there.

A class becomes a component by deriving from `RemoteComponent` (or by `@remote_class`). Building it asks the session's launcher;
methods marked with `@remote_function` are what a handle shows. `dispatch` and `collect` are pure functions over arguments and
mesh. Nothing here knows a mode.
"""

from twinkle_core.remote.component import RemoteComponent, RemoteMeta, build, remote_class
from twinkle_core.remote.handle import make_handle
from twinkle_core.remote.marks import RemoteMark, find_mark, marked_methods, remote_function

__all__ = [
    "RemoteComponent", "RemoteMark", "RemoteMeta", "build", "find_mark", "make_handle", "marked_methods", "remote_class",
    "remote_function",
]
