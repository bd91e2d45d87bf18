"""The ranks of one node: torch's elastic agent starts them, and here it is watched how they end, on this node and on the others.

Imported only where torch is.
"""

import contextlib
import os
import signal
import sys
import time
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from twinkle_core.launchers.meeting import Meeting
from twinkle_core.launchers.rank_logs import Failure, RankLogs, show

_STOP_S = 5  # how long the other ranks may take to end before they are killed
_OTHERS_S = 5.0  # how long to wait for another node to say why a rank here found its peer gone


class NodeAgent(LocalElasticAgent):
    """Runs the ranks of this node until all ranks of the run have ended well, or one has failed and no restart is left.

    Attributes:
        status: exit status of the run.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, meeting: Meeting) -> None:
        super().__init__(spec, logs_specs=logs, shutdown_timeout=_STOP_S)
        self.status = 0
        self._logs, self._meeting = logs, meeting
        self._restarts, self._max_restarts = 0, spec.max_restarts

    def stop(self) -> None:
        """Kill what is left of the ranks and of the processes that they have started."""
        for handler in self._handlers().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(handler.proc.pid, signal.SIGKILL)  # each rank leads a group of its own

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]  torch's decorator hides that it is a method
        self, worker_group: WorkerGroup,
    ) -> RunResult:
        """Return how the run fares; called by torch's agent ten times a second."""
        handlers = self._handlers()
        statuses = {worker.global_rank: handlers[worker.local_rank].proc.poll() for worker in worker_group.workers}
        failed = {rank: status for rank, status in statuses.items() if status}
        try:
            if failed:
                return self._fail(self._logs.first_failure(failed))
            if (elsewhere := self._meeting.failure()) is not None:
                return self._fail(None, elsewhere)
            if (node := self._meeting.silent_node()) is not None:
                return self._fail(None, self._meeting.publish_failure(_silent(node).to_json()))
            if all(status == 0 for status in statuses.values()) and self._meeting.all_have_finished():
                self._meeting.leave()
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(statuses))
        except DistError:
            own = self._logs.first_failure(failed) if failed else None
            return self._stopped(own if own is not None and not own.is_consequence else None, _node_0_is_gone())
        return RunResult(state=WorkerState.HEALTHY)

    def _fail(self, own: Failure | None, elsewhere: dict[str, Any] | None = None) -> RunResult:
        """End this attempt because of a failure here or on another node, and tell the others."""
        if own is not None and self._meeting.nnodes > 1:
            if own.is_consequence:
                elsewhere = self._failure_elsewhere()
            if elsewhere is None:
                said = self._meeting.publish_failure(own.to_json())
                elsewhere = said if own.is_consequence and said["node"] != self._meeting.node else None
        return self._stopped(own if elsewhere is None else None, elsewhere)

    def _stopped(self, own: Failure | None, elsewhere: dict[str, Any] | None) -> RunResult:
        """Say why this attempt ends, and stop the ranks."""
        if own is not None:
            show(own, self._logs, is_alone=self._worker_group.workers[0].world_size == 1)
            self.status = own.status
        elif elsewhere is not None:
            reason = f": {elsewhere['summary']}" if elsewhere["summary"] else ""
            print(f"{elsewhere['what']} on node {elsewhere['node']}{reason}. The ranks of this node were stopped. "
                  f"Output of rank N: {self._logs.folder}/rank_N.txt.", file=sys.stderr)
            self.status = elsewhere["status"]
        is_over = self._restarts >= self._max_restarts
        with contextlib.suppress(DistError):
            if is_over and self._meeting.node:
                self._meeting.leave()
        self._shutdown(signal.SIGTERM, timeout=_STOP_S)
        self.stop()
        if is_over:
            with contextlib.suppress(DistError):
                self._meeting.leave()
        else:
            self._restarts += 1
            self.status = 0
            print(f"Running the script again (restart {self._restarts} of {self._max_restarts}).", file=sys.stderr)
        return RunResult(state=WorkerState.FAILED)

    def _failure_elsewhere(self) -> dict[str, Any] | None:
        """Return another node's failure, for which those of this node's ranks wait that miss a peer; None if there is none."""
        end = time.monotonic() + _OTHERS_S
        while time.monotonic() < end:
            if (elsewhere := self._meeting.failure()) is not None:
                return elsewhere
            node = self._meeting.silent_node(_OTHERS_S - 2)
            if node is not None:
                return self._meeting.publish_failure(_silent(node).to_json())
            time.sleep(0.1)
        return None

    def _exit_barrier(self) -> None:
        """Nothing to wait for: no node ends before all have finished."""

    def _handlers(self) -> dict[int, Any]:
        return getattr(self._pcontext, "subprocess_handlers", {})


def _silent(node: int) -> Failure:
    return Failure(what=f"Node {node} has given no sign of life", summary="its `twinkle launch` was killed, or the network failed",
                   status=1)


def _node_0_is_gone() -> dict[str, Any]:
    return {**Failure(what="The launcher is gone", summary="it was killed, or the network failed", status=1).to_json(), "node": 0}
