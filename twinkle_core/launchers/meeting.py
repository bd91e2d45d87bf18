"""Where the nodes of a run meet: a key-value store that node 0 opens, at an address that every node is told.

Here nodes find each other, compare what they were asked for, and tell each other how their ranks fare. Starting and stopping ranks
is left to `agent`. Waiting is done in small steps, so that Ctrl-C ends it. Imported only where torch is.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from twinkle_core.errors import ArgumentError, ModeError

MEETING_S = 300.0
"""How long the first node waits for the last: a scheduler starts them minutes apart."""

SILENCE_S = 20.0
"""After how long without a sign of life a node counts as gone. The agent gives one a second, but none while it stops ranks."""

_NOTICE_S = 5.0
_STEP_S = 0.1
_STORE_S = 30  # what one request to node 0 may take


class Meeting(RendezvousHandler):
    """One node's seat among `nnodes`; torch's elastic agent asks it where the ranks find each other.

    Attributes:
        node: number of this node.
        nnodes: of the run.
        address: of node 0, as the other nodes reach it.
        port: of node 0.
    """

    def __init__(self, store: TCPStore, *, node: int, nnodes: int, address: str) -> None:
        self.node, self.nnodes, self.address, self.port = node, nnodes, address, store.port
        self._store = store
        self._ranks_store: TCPStore | None = None
        self._attempt = -1
        self._heard: dict[int, tuple[int, float]] = {}
        self._signed_at = 0.0
        self._has_left = self._has_finished = False

    def join(self, asked: Mapping[str, Any]) -> None:
        """Wait for the other nodes.

        Args:
            asked: what must be the same on every node.

        Raises: `ModeError` if they do not come in time, or this seat is taken; `ArgumentError` if they ask for different things.
        """
        if self.node >= self.nnodes or self._store.add(f"seat/{self.node}", 1) > 1:
            raise ModeError(f"The run at {self.address}:{self.port} has its {self.nnodes} node(s) already, or this node: number "
                            f"{self.node}. If this is another run, give each its own port; else give each node its own "
                            "`--node-rank`.")
        first = json.loads(self._store.compare_set("asked", "", json.dumps(dict(asked))))
        if first != dict(asked):
            ours, theirs = (", ".join(f"{name}={values.get(name)}" for name in asked if asked[name] != first.get(name))
                            for values in (asked, first))
            text = f"Node {self.node} was started with {ours}, another with {theirs}. Start every node with the same."
            self._store.set("refused", text)
            raise ArgumentError(text)
        self._store.add("present", 1)
        _wait(lambda: self._check_refused() or self._store.add("present", 0) >= self.nnodes,
              lambda: f"{self._store.add('present', 0)} of {self.nnodes} nodes are at {self.address}:{self.port}. Start the same "
                      "command on every node.")

    def _check_refused(self) -> bool:
        if self._store.check(["refused"]):
            raise ArgumentError(self._store.get("refused").decode())
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return where the ranks of the next attempt find each other."""
        self._attempt += 1
        self._has_finished = False
        port = self.port
        if self._attempt:  # a store of its own: in the old one ranks would find the addresses of the dead
            if self.node == 0:
                self._ranks_store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
                self._store.set(f"port/{self._attempt}", str(self._ranks_store.port))
            port = int(self._store.get(f"port/{self._attempt}"))
        store = PrefixStore(f"attempt/{self._attempt}", self._store)
        return RendezvousInfo(store, self.node, self.nnodes, RendezvousStoreInfo(self.address, port))

    def publish_failure(self, cause: Mapping[str, Any]) -> dict[str, Any]:
        """Tell the others why this attempt has failed; return what they take for the reason: `cause` with its node, unless another
        was first."""
        own = json.dumps({**cause, "node": self.node})
        return json.loads(self._store.compare_set(self._failure_key, "", own))

    def failure(self) -> dict[str, Any] | None:
        """Return what ended this attempt on the node that failed first, or None."""
        if self.nnodes == 1 or not self._store.check([self._failure_key]):
            return None
        return json.loads(self._store.get(self._failure_key))

    @property
    def _failure_key(self) -> str:
        return f"failure/{self._attempt}"

    def all_have_finished(self) -> bool:
        """Say that the ranks of this node have ended well; return whether those of all nodes have."""
        key = f"finished/{self._attempt}"
        if not self._has_finished:
            self._has_finished = True
            self._store.add(key, 1)
        return self._store.add(key, 0) == self.nnodes

    def silent_node(self, silence_s: float = SILENCE_S) -> int | None:
        """Give a sign of life. On node 0, return a node that has given none for so long, or None."""
        now = time.monotonic()
        if self.nnodes == 1 or now - self._signed_at < 1:
            return None
        self._signed_at = now
        if self.node:
            self._store.add(f"alive/{self.node}", 1)
            return None
        for node in range(1, self.nnodes):
            count = self._store.add(f"alive/{node}", 0)
            if node not in self._heard or self._heard[node][0] != count:
                self._heard[node] = (count, now)
        return next((node for node, (_, heard) in self._heard.items() if now - heard > silence_s), None)

    def leave(self, timeout_s: float = 10.0) -> None:
        """Say that this node needs the store no more; on node 0, which holds it, wait until the others have said so."""
        if not self._has_left:
            self._has_left = True
            self._store.add("left", 1)
        end = time.monotonic() + timeout_s
        while self.node == 0 and self._store.add("left", 0) < self.nnodes and time.monotonic() < end:
            time.sleep(_STEP_S)

    def get_backend(self) -> str:
        """Return the name that torch's records show."""
        return "twinkle"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use a store of this process, none of their own."""
        return True

    def is_closed(self) -> bool:
        """Never: the nodes of a run are fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node comes later."""
        return 0

    def get_run_id(self) -> str:
        """Return a name for the run."""
        return f"{self.address}:{self.port}"

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this process."""
        return True


def meet(*, nnodes: int, node: int | None, address: str, port: int | None) -> Meeting:
    """Open or find the store at `address` and return this node's seat. Without `port`, one node on a free port.

    Without a number (`node`) the node that has the address is number 0, and the others are numbered as they come.

    Raises: `ArgumentError` if node 0 cannot listen there, `ModeError` if nobody answers.
    """
    if port is None:
        return Meeting(_open("127.0.0.1", 0), node=0, nnodes=nnodes, address="127.0.0.1")
    if node == 0 or (node is None and _is_free_here(address, port)):
        return Meeting(_open(address, port), node=0, nnodes=nnodes, address=address)
    _wait(lambda: _answers(address, port),
          lambda: f"nobody answers at {address}:{port}. Start node 0 there, and see that this port can be reached from here.")
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
    number = store.add("next", 1) if node is None else node
    return Meeting(store, node=number, nnodes=nnodes, address=address)


def _open(address: str, port: int) -> TCPStore:
    check_port(address, port)
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
    except DistNetworkError as error:
        raise ArgumentError(f"{address}:{port} cannot be listened on: {str(error).splitlines()[0]}. Use another port.") from error


def check_port(address: str, port: int) -> None:
    """Raise `ArgumentError`, with what to do, unless this node can listen on `port` of its `address`."""
    try:
        free = _is_free_here(address, port)
    except OSError as error:
        raise ArgumentError(f"Port {port} of {address} cannot be listened on: {error}. Use a port from 1024 to 65535.") from error
    if free is None:
        raise ArgumentError(f"`{address}` is not an address of this node. Use one of node 0's that the other nodes can reach; on "
                            "nodes 1, 2, ... say `--node-rank` too.")
    if not free:
        raise ArgumentError(f"Port {port} is in use on {address}, perhaps by another run. Use a free port, or on a single node "
                            "leave it out.")


def _is_free_here(address: str, port: int) -> bool | None:
    """Return whether `port` of this node's own `address` is free; None if the address is not this node's."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((target[0], 0))
    except OSError:
        return None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen()
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def _wait(is_there: Callable[[], bool], problem: Callable[[], str]) -> None:
    """Wait until `is_there()`. Raises: `ModeError` with `problem()` after `MEETING_S`; it is a notice before."""
    begin, has_said = time.monotonic(), False
    while not is_there():
        waited = time.monotonic() - begin
        if waited > MEETING_S:
            raise ModeError(f"After {MEETING_S:.0f} s {problem()}")
        if waited > _NOTICE_S and not has_said:
            has_said = True
            print(f"twinkle: waiting; {problem()}", file=sys.stderr)
        time.sleep(_STEP_S)


def interface_to(address: str, port: int) -> str | None:
    """Return the name of the network interface by which this node reaches `address`, or None where the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl
    import struct

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of <linux/sockios.h>
                except OSError:  # an interface without an IPv4 address
                    continue
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    except OSError:
        return None
    return None
