"""Mode `torchrun` of the command line: starts one process a rank on this node, with `torch.distributed.run`'s own agent.

Each process is then in mode `local` (see `LocalLauncher`), as under plain `torchrun`. Rank 0 writes to the terminal, the others to
`logs/rank_N.txt`; when a rank fails, its traceback or signal is what the terminal shows first. What is asked for is checked
here; nodes meet in `meeting`, and ranks are watched in `agent`. Process groups are left to `parallel`.
"""

import dataclasses
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twinkle_core.errors import ArgumentError, MissingExtraError, ModeError, listing
from twinkle_core.launchers.interface import Launcher, LauncherOption, Topology
from twinkle_core.launchers.script import check_script
from twinkle_core.mesh import DeviceGroup, DeviceMesh
from twinkle_core.remote import RemoteMark
from twinkle_core.session import Session
from twinkle_core.settings import LaunchRequest, gloo_environ, quiet_torch, thread_environ, update_environ

LOGS = "logs"
_ADDRESS = "127.0.0.1"


class TorchrunLauncher(Launcher):
    """Starts the ranks of this node."""

    options = (
        LauncherOption(name="nnodes", type=int, help="Nodes of the run; start this command on each.", default=1),
        LauncherOption(name="node_rank", type=int, help="Number of this node, from 0. Needs --master-addr and --master-port."),
        LauncherOption(name="master_addr", type=str, help=f"Address of node 0. Default: {_ADDRESS}."),
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
        nproc = 1 if request.nproc_per_node is None else request.nproc_per_node
        _check_sizes(request.mesh, nproc, values)
        own = {option.name for option in cls.options}
        child = dataclasses.replace(
            request, mode="local", nproc_per_node=None,
            options={name: value for name, value in request.options.items() if name not in own})
        update_environ({**child.to_environ(), **thread_environ(nproc)})
        return _run(str(path), argv, nproc, values, mesh=request.mesh)

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


def _check_sizes(mesh: str | None, nproc: int, values: Mapping[str, Any]) -> None:
    """Refuse, before any process is started, sizes that do not fit each other."""
    nnodes, node, endpoint = values["nnodes"], values["node_rank"], values["rdzv_endpoint"]
    if nproc < 1 or nnodes < 1 or values["max_restarts"] < 0:
        raise ArgumentError(f"`--nproc-per-node {nproc} --nnodes {nnodes} --max-restarts {values['max_restarts']}`: use at least 1 "
                            "process, 1 node and 0 restarts.")
    if mesh:
        DeviceMesh.parse(mesh).check_world_size(nnodes * nproc, where=f"`--nnodes {nnodes} --nproc-per-node {nproc}`")
    if endpoint is not None:
        others = [f"--{name.replace('_', '-')}" for name in ("node_rank", "master_addr", "master_port") if values[name] is not None]
        if others:
            raise ArgumentError(f"`--rdzv-endpoint {endpoint}` says where the nodes meet, and they are numbered as they come. "
                                f"Leave out {listing(others)}.")
        _endpoint(endpoint)
        return
    if nnodes > 1 and (node is None or values["master_port"] is None):
        raise ArgumentError(f"`--nnodes {nnodes}` needs to know where the nodes meet. Say `--node-rank I --master-addr A "
                            "--master-port P` (the same A and P on every node), or `--rdzv-endpoint HOST:PORT`.")
    if node is not None and not 0 <= node < nnodes:
        raise ArgumentError(f"`--node-rank {node}` is not a node of `--nnodes {nnodes}`. Use 0 to {nnodes - 1}.")
    if values["master_port"] is not None and not 0 < values["master_port"] < 2**16:
        raise ArgumentError(f"`--master-port {values['master_port']}` is not a port. Use 1024 to 65535.")


def _endpoint(text: str) -> tuple[str, int]:
    """Return host and port. Raises: `ArgumentError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentError(f"`--rdzv-endpoint {text}` is not of the form HOST:PORT, as in `10.0.0.1:29500`.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _run(script: str, argv: Sequence[str], nproc: int, values: Mapping[str, Any], *, mesh: str | None) -> int:
    """Start the ranks of this node, wait for their end, and return the exit status of the run."""
    with quiet_torch():
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.launcher.api import LaunchConfig

        from twinkle_core.launchers.agent import NodeAgent
        from twinkle_core.launchers.meeting import interface_to, meet
        from twinkle_core.launchers.rank_logs import RankLogs

    for name in ("", ".agent.server.api"):  # what failed is said once, by `agent`
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    nnodes, node = values["nnodes"], values["node_rank"]
    if values["rdzv_endpoint"] is not None:
        address, port = _endpoint(values["rdzv_endpoint"])
    else:
        address, port, node = values["master_addr"] or _ADDRESS, values["master_port"], node or 0
    with tempfile.TemporaryDirectory(prefix="twinkle-") as folder:
        logs = RankLogs(Path(LOGS), error_folder=Path(folder))
        if nnodes * nproc > 1:
            logs.check_writable()
        meeting = meet(nnodes=nnodes, node=node, address=address, port=port)
        meeting.join({"--nnodes": nnodes, "--nproc-per-node": nproc, "--mesh": mesh, "--max-restarts": values["max_restarts"]})
        if nnodes > 1:
            update_environ(gloo_environ(interface_to(address, meeting.port)))
        if meeting.node:
            print(f"Ranks {meeting.node * nproc} to {meeting.node * nproc + nproc - 1} run here. Output of rank N: "
                  f"{LOGS}/rank_N.txt.", file=sys.stderr)
        command = ("-u", "-m", "twinkle_core.launchers.rank", str(os.getpid()), script, *argv)
        spec = WorkerSpec(
            role="default", local_world_size=nproc, entrypoint=sys.executable, max_restarts=values["max_restarts"],
            args=tuple(word.replace("$", "$$") for word in command), rdzv_handler=meeting,  # the agent reads them as templates
            numa_options=LaunchConfig(min_nodes=nnodes, max_nodes=nnodes, nproc_per_node=nproc, logs_specs=logs).numa_options)
        agent = NodeAgent(spec, logs, meeting)
        try:
            agent.run()  # pyright: ignore[reportUnknownMemberType]  torch's decorator has no types
        except SignalException as error:
            agent.stop()
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            return 128 + int(error.sigval)
        return agent.status
