"""Mode `torchrun` of the command line: starts one process a rank on this node, with `torch.distributed.run`'s own agent.

Each process is then in mode `local` (see `LocalLauncher`), as under plain `torchrun`. Rank 0 writes to the terminal, the others to
`logs/rank_N.txt`; when a rank fails, its traceback or signal is what the terminal shows first. Process groups are left to
`parallel`.
"""

import dataclasses
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twinkle_core.errors import ArgumentError, MissingExtraError, ModeError
from twinkle_core.launchers.interface import Launcher, LauncherOption, Topology
from twinkle_core.launchers.script import check_script
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.remote import RemoteMark
from twinkle_core.session import Session
from twinkle_core.settings import LaunchRequest, thread_environ

LOGS = "logs"
_STOP_S = 5  # how long the other ranks may take to end before they are killed


class TorchrunLauncher(Launcher):
    """Starts the ranks of this node."""

    options = (
        LauncherOption(name="nnodes", type=int, help="Nodes of the run; start this command on each.", default=1),
        LauncherOption(name="node_rank", type=int, help="Number of this node, from 0. Needs --master-addr and --master-port."),
        LauncherOption(name="master_addr", type=str, help="Address of node 0.", default="127.0.0.1"),
        LauncherOption(name="master_port", type=int, help="A free port of node 0."),
        LauncherOption(name="rdzv_endpoint", type=str, help="HOST:PORT where the nodes meet, instead of --master-addr and -port."),
        LauncherOption(name="max_restarts", type=int, help="How often the script is run again after a rank failed.", default=0),
    )
    accepts = frozenset({"nproc_per_node", "mesh"})

    @classmethod
    def launch(cls, script: str | None, argv: Sequence[str], request: LaunchRequest) -> int:
        """Run `script` on every rank of this node and return the exit status: 0, or that of the rank that failed first."""
        path = check_script(script)
        if find_spec("torch") is None:
            raise MissingExtraError("Mode `torchrun` needs torch, which is not installed. Run: pip install 'twinkle-core[train]'")
        values = cls.check_options(request.options, where="twinkle launch --mode torchrun")
        nproc = request.nproc_per_node or 1
        _check_sizes(request, nproc, values)
        own = {option.name for option in cls.options}
        child = dataclasses.replace(
            request, mode="local", nproc_per_node=None,
            options={name: value for name, value in request.options.items() if name not in own})
        os.environ.update(child.to_environ())
        os.environ.update(thread_environ(nproc))
        return _run(str(path), argv, nproc, values)

    def start(self, session: Session) -> None:
        """Refuse: this mode starts processes, which are then in mode `local`."""
        raise ModeError("`torchrun` starts processes and is not a mode of a script: each of them is in mode `local`. Use "
                        "`initialize(mode=\"local\")` and start the script with `twinkle launch --mode torchrun` or `torchrun`.")

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: DeviceGroup | None, mesh: DeviceMesh | None,
    ) -> Any:
        """Never reached: `start` refuses."""
        raise NotImplementedError

    def call(self, handle: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: RemoteMark) -> Any:
        """Never reached: `start` refuses."""
        raise NotImplementedError

    def topology(self) -> Topology:
        """Never reached: `start` refuses."""
        raise NotImplementedError


def _check_sizes(request: LaunchRequest, nproc: int, values: Mapping[str, Any]) -> None:
    """Refuse, before any process is started, sizes that do not fit each other."""
    nnodes, node_rank = values["nnodes"], values["node_rank"]
    if nnodes < 1 or values["max_restarts"] < 0:
        raise ArgumentError(f"`--nnodes {nnodes} --max-restarts {values['max_restarts']}`: use at least 1 node and 0 restarts.")
    if request.mesh:
        DeviceMesh.parse(request.mesh).check_world_size(
            nnodes * nproc, where=f"`--nnodes {nnodes} --nproc-per-node {nproc}`")
    if values["rdzv_endpoint"]:
        return
    if nnodes > 1 and (node_rank is None or values["master_port"] is None):
        raise ArgumentError(f"`--nnodes {nnodes}` needs to know where the nodes meet. Say `--node-rank I --master-addr A "
                            "--master-port P` (the same A and P on every node), or `--rdzv-endpoint HOST:PORT`.")
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise ArgumentError(f"`--node-rank {node_rank}` is not a node of `--nnodes {nnodes}`. Use 0 to {nnodes - 1}.")
    if values["master_port"] is not None and not node_rank:
        _check_port(values["master_addr"], values["master_port"])


def _check_port(address: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(f"`--master-port {port}` is in use on {address}, perhaps by another run. Use a free port, or "
                                    "leave it out on a single node.") from error
            raise ArgumentError(f"`--master-addr {address}` cannot be listened on: {error}. Use an address of this node on node 0, "
                                "the one that the other nodes can reach.") from error


def _run(script: str, argv: Sequence[str], nproc: int, values: Mapping[str, Any]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from twinkle_core.launchers.rank_logs import RankLogs

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `RankLogs` says what failed, once
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": values["rdzv_endpoint"] or "127.0.0.1:0"}
    if not values["rdzv_endpoint"] and values["master_port"] is not None:
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": f"{values['master_addr']}:{values['master_port']}",
                   "rdzv_configs": {"rank": values["node_rank"] or 0, "timeout": 300}}
    with tempfile.TemporaryDirectory(prefix="twinkle-") as folder:
        logs = RankLogs(Path(LOGS), error_folder=Path(folder))
        config = LaunchConfig(
            min_nodes=values["nnodes"], max_nodes=values["nnodes"], nproc_per_node=nproc, max_restarts=values["max_restarts"],
            run_id=values["rdzv_endpoint"] or uuid.uuid4().hex, logs_specs=logs, shutdown_timeout=_STOP_S, start_method="spawn",
            **meeting)
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "twinkle_core.launchers.rank", script, *argv)
        except ChildFailedError as error:
            return logs.report(error.failures)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            return 128 + int(error.sigval)
    return 0
