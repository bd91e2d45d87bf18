"""The interface of a mode.

A launcher works in two places. On the command line, `launch` starts the processes that run a script. Inside each of them,
`create` builds components and `call` calls their marked methods. Components never ask which launcher they have.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle_core.errors import ArgumentError, ModeError, did_you_mean, listing
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.settings import LaunchRequest

if TYPE_CHECKING:
    from twinkle_core.remote.marks import RemoteMark
    from twinkle_core.session import Session


@dataclass(frozen=True, kw_only=True)
class LauncherOption:
    """An option of a launcher: `--log-dir` on its command line and `log_dir=` of `initialize`.

    Attributes:
        name: as a Python keyword, e.g. "log_dir".
        type: `str`, `int`, `float` or `bool`.
        help: one sentence.
        default: value when nobody says one.
        choices: the allowed values, if not all.
    """

    name: str
    type: type
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any, *, where: str) -> Any:
        """Return `value` if it is allowed. Raises: `ArgumentError`."""
        is_number = self.type is float and isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not is_number and (not isinstance(value, self.type) or (
                isinstance(value, bool) and self.type is not bool)):
            raise ArgumentError(f"`{where}`: `{self.name}={value!r}` is a {type(value).__name__}. Use a {self.type.__name__}.")
        if self.choices and value is not None and value not in self.choices:
            raise ArgumentError(f"`{where}`: `{self.name}={value!r}` is not allowed. Use one of: {listing(self.choices)}.")
        return value


COMMON_OPTIONS = (
    LauncherOption(name="log_dir", type=str, help="Folder for metrics.jsonl, TensorBoard events and loss.png. Default: none."),
    LauncherOption(name="plot", type=bool, help="Draw loss.png in the log folder when the run ends.", default=False),
)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this process stands: its rank among the `world_size` processes of the run, and among those of its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


class Launcher(ABC):
    """A mode.

    Class attributes:
        options: what `twinkle launch --mode X` and `initialize(mode=X)` take, beside what every mode takes.
        needs_script: whether the command line must name a script.
        accepts: which of `nproc_per_node`, `mesh` and `group` its command line takes.
    """

    options: ClassVar[tuple[LauncherOption, ...]] = ()
    needs_script: ClassVar[bool] = True
    accepts: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *, nproc_per_node: int | None = None, options: Mapping[str, Any]) -> None:
        self.nproc_per_node = nproc_per_node
        self.values = dict(options)

    @classmethod
    def all_options(cls) -> tuple[LauncherOption, ...]:
        """Return the options of this mode and those of every mode."""
        return (*COMMON_OPTIONS, *cls.options)

    @classmethod
    def check_options(cls, given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Return every option with its value. Raises: `ArgumentError` for an unknown one, with near matches."""
        declared = {option.name: option for option in cls.all_options()}
        for name in given:
            if name not in declared:
                raise ArgumentError(f"`{where}` has no option `{name}`.{did_you_mean(name, declared)} Its options: "
                                    f"{listing(declared)}.")
        return {name: option.check(given.get(name, option.default), where=where) for name, option in declared.items()}

    @classmethod
    @abstractmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Run `script` with the arguments `argv` and return the exit status. Called on the command line."""

    @abstractmethod
    def start(self, session: "Session") -> None:
        """Prepare this process. Called once, by `initialize`, which has filled in everything but what is set here.

        Raises: `MeshError` if the session's mesh or groups do not fit the processes there are.
        """

    @abstractmethod
    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Return a component: the object, or a handle for which `isinstance(handle, cls)` holds.

        Use `twinkle_core.remote.build` to make the object where it lives.
        """

    @abstractmethod
    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: "RemoteMark") -> Any:
        """Call a marked method of a handle and return its collected result."""

    @abstractmethod
    def topology(self) -> Topology:
        """Return where this process stands."""

    def placement(self) -> str:
        """Return, for people, which processes there are, where they run, and what lives in them."""
        place = self.topology()
        return (f"This process: rank {place.rank} of {place.world_size}, number {place.local_rank} on its machine. Everything "
                "lives in it.")

    def reduce(self, handle: Any) -> tuple[Any, ...]:
        """Return how to make a handle anew in another process, as `object.__reduce__` does. For modes whose handles may travel."""
        raise ModeError(f"{handle!r} cannot travel to another process in this mode. Pass what its methods return instead.")

    def shutdown(self) -> None:  # noqa: B027  many launchers have nothing to stop
        """Stop what `start` started. Called once, at the end."""
