"""Choosing a device among the installed platforms."""

from twinkle_core import registry, session
from twinkle_core.errors import ArgumentError, ArgumentTypeError, did_you_mean, listing
from twinkle_core.platforms.interface import Platform


def choose_device(device: str | None) -> str:
    """Return the device for this process, e.g. "cuda:0": what was asked for, else the best there is.

    Raises: `ArgumentError` for a kind that no platform registers, or that this machine does not have.
    """
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(f"`device={device!r}` is of type {type(device).__name__}. Use a string such as \"cpu\" or "
                                "\"cuda:0\", or None for the best there is.")
    found = {name: platform_of(name) for name in registry.names("platforms")}
    if device is None:
        kind = max((name for name in found if found[name].count()), key=lambda name: found[name].priority)
        return _indexed(kind, found[kind], session.current().launcher.topology().local_rank)
    kind, _, index = device.partition(":")
    if kind not in found:
        raise ArgumentError(f"`device={device!r}`: no platform `{kind}` is installed.{did_you_mean(kind, found)} "
                            f"Installed: {listing(found)}.")
    if index and (not index.isdecimal() or int(index) >= found[kind].count()):
        raise ArgumentError(f"`device={device!r}`: this process sees {found[kind].count()} device(s) of kind `{kind}`. Use "
                            f"`{kind}:0` to `{kind}:{max(0, found[kind].count() - 1)}`, or None for the best there is.")
    if not found[kind].count():
        usable = listing(name for name in found if found[name].count())
        raise ArgumentError(f"`device={device!r}`: this process sees no device of kind `{kind}` (or its torch was built without). "
                            f"Usable: {usable}.")
    return device if index else _indexed(kind, found[kind], session.current().launcher.topology().local_rank)


def platform_of(device: str) -> Platform:
    """Return the platform of a device such as "cuda:0"."""
    return registry.resolve("platforms", device.partition(":")[0])()


def _indexed(kind: str, platform: Platform, local_rank: int) -> str:
    """Return the device of this rank. Raises: `ArgumentError` if it has none of its own; the CPU is shared."""
    if kind == "cpu":
        return kind
    if local_rank >= platform.count():
        raise ArgumentError(f"Local rank {local_rank} has no device of its own: this node has {platform.count()} of kind `{kind}`. "
                            f"Start at most {platform.count()} rank(s) a node (`--nproc-per-node`), or say which `device=` they "
                            "are to share, e.g. \"cpu\".")
    return f"{kind}:{local_rank}"
