"""Two nodes: two launches of one script in two network namespaces, or on the loopback where namespaces are not allowed."""

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinkle_core.errors import ArgumentError, ModeError
from twinkle_core.launchers import meeting
from twinkle_core.launchers.meeting import Meeting, meet

SHOW = ("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        "print(rank, os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'], flush=True)\n")
GROUP = (SHOW + "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
                "total = torch.tensor([rank])\ndist.all_reduce(total)\nprint('sum', int(total), flush=True)\n")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Network:
    """Two nodes: what a command on each begins with, and the address of node 0."""

    before: tuple[tuple[str, ...], tuple[str, ...]]
    address: str


@contextlib.contextmanager
def namespaces(folder: Path) -> Iterator[Network | None]:
    """Two network namespaces that a pair of interfaces joins; None where this user may not make them.

    Names are looked up in a file of their own, since no name server can be reached from there.
    """
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n10.213.7.1 nodea\n10.213.7.2 nodeb\n")
    shell = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))
    names = [f"twinkle{os.getpid()}{side}" for side in "ab"]
    addresses = ("10.213.7.1", "10.213.7.2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "nodea", "netns", names[0], "type", "veth", "peer", "name", "nodeb", "netns", names[1])
            for name, address, side in zip(names, addresses, "ab", strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", f"node{side}")
                for device in (f"node{side}", "lo"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError):
            yield None
        else:
            first, second = (("ip", "netns", "exec", name, *shell) for name in names)
            yield Network((first, second), addresses[0])
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with namespaces(tmp_path_factory.mktemp("network")) as found:
        yield found or Network(((), ()), "127.0.0.1")


@pytest.fixture
def nodes(start, network: Network) -> Callable[..., list["subprocess.Popen[str]"]]:
    """`nodes(text, *options, endpoint=False)`: begin the launch of two ranks on each of both nodes, in folders `node0`, `node1`."""

    def begin(text: str, *options: str, endpoint: bool = False) -> list["subprocess.Popen[str]"]:
        port = str(free_port())
        where = ["--rdzv-endpoint", f"{network.address}:{port}"] if endpoint else [
            "--master-addr", network.address, "--master-port", port]
        return [start(text, "--nnodes", "2", *where, *([] if endpoint else ["--node-rank", str(node)]), *options,
                      before=network.before[node], folder=f"node{node}") for node in range(2)]

    return begin


def ends(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """Return status, stdout and stderr of each."""
    found = [process.communicate(timeout=90) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]


def log(folder: Path, rank: int) -> list[str]:
    return own_lines((folder / f"node{rank // 2}" / "logs" / f"rank_{rank}.txt").read_text())


def own_lines(text: str) -> list[str]:
    """Return the lines but for torch's warnings: no name server can be reached from a namespace."""
    return [line for line in text.splitlines() if not line.startswith("[W")]


@pytest.mark.slow
def test_ranks_of_two_nodes_talk_and_a_failure_on_one_ends_both(nodes, tmp_path: Path) -> None:
    started = nodes(GROUP + "if rank == 3:\n    raise ValueError('unhappy')\ndist.barrier()\n")
    assert started[0].stdout.readline() == "0 0 0 4\n"
    begin = time.monotonic()
    (status_0, rest, error_0), (status_1, out_1, error_1) = ends(started)
    assert time.monotonic() - begin < 30
    assert (status_0, status_1) == (1, 1)
    assert (rest, out_1) == ("sum 6\n", "")
    assert [log(tmp_path, rank)[:2] for rank in (1, 2, 3)] == [
        ["1 1 0 4", "sum 6"], ["2 0 1 4", "sum 6"], ["3 1 1 4", "sum 6"]]
    assert not (tmp_path / "node1" / "logs" / "rank_0.txt").exists()
    assert own_lines(error_0) == ["Rank 3 failed on node 1: ValueError: unhappy. The ranks of this node were stopped. Output of "
                                  "rank N: logs/rank_N.txt."]
    assert own_lines(error_1)[:2] == [
        "Ranks 2 to 3 run here. Output of rank N: logs/rank_N.txt.",
        "Rank 3 failed; the other ranks were stopped. Output of rank N: logs/rank_N.txt."]
    assert "Traceback" in error_1
    assert error_1.rstrip().endswith("ValueError: unhappy")


@pytest.mark.slow
def test_nodes_that_meet_at_an_endpoint_are_numbered_and_a_failure_reaches_ranks_that_wait_for_nothing(nodes) -> None:
    text = SHOW + ("attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nif rank == 3 and attempt == '0':\n    sys.exit(3)\n"
                   "if rank < 2 and attempt == '0':\n    time.sleep(600)\n")
    ended = ends(nodes(text, "--max-restarts", "1", endpoint=True))
    assert [status for status, _, _ in ended] == [0, 0]
    first, second = sorted(ended, key=lambda end: end[1], reverse=True)  # which of two on one address came first is open
    assert (first[1], second[1]) == ("0 0 0 4\n0 0 0 4\n", "")
    assert first[2].splitlines() == [
        "Rank 3 ended with exit status 3 on node 1: exit status 3. The ranks of this node were stopped. Output of rank N: "
        "logs/rank_N.txt.", "Running the script again (restart 1 of 1)."]
    assert second[2].splitlines()[1:] == [
        "Rank 3 ended with exit status 3; the other ranks were stopped. Output of rank N: logs/rank_N.txt.",
        "Running the script again (restart 1 of 1)."]


@pytest.mark.slow
def test_when_the_launcher_of_node_0_is_killed_node_1_ends(nodes) -> None:
    first, second = nodes(SHOW + "time.sleep(600)\n")
    assert first.stdout.readline() == "0 0 0 4\n"
    first.kill()
    begin = time.monotonic()
    _, error = second.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert second.returncode == 1
    assert error.splitlines()[-1] == ("The launcher is gone on node 0: it was killed, or the network failed. The ranks of this "
                                      "node were stopped. Output of rank N: logs/rank_N.txt.")


ASKED = {"--nnodes": 2, "--nproc-per-node": 2}


def both(port: int, asked_1: dict[str, int] = ASKED) -> tuple[Meeting, Meeting, list[Exception]]:
    """Return the seats of two nodes, and what joining raised."""
    first = meet(nnodes=2, node=0, address="127.0.0.1", port=port)
    second = meet(nnodes=2, node=1, address="127.0.0.1", port=port)
    raised: list[Exception] = []

    def join(seat: Meeting, asked: dict[str, int]) -> None:
        try:
            seat.join(asked)
        except (ArgumentError, ModeError) as error:
            raised.append(error)

    other = threading.Thread(target=join, args=(first, ASKED))
    other.start()
    while not first._store.check(["asked"]):
        time.sleep(0.01)
    join(second, asked_1)
    other.join()
    return first, second, raised


def test_nodes_that_were_started_differently_are_refused_on_both() -> None:
    _, _, raised = both(free_port(), {**ASKED, "--nproc-per-node": 4})
    assert [str(error) for error in raised] == 2 * [
        "Node 1 was started with --nproc-per-node=4, another with --nproc-per-node=2. Start every node with the same."]


def test_a_seat_that_is_taken_is_refused() -> None:
    port = free_port()
    first, _, raised = both(port)
    assert raised == []
    third = meet(nnodes=2, node=1, address="127.0.0.1", port=port)
    with pytest.raises(ModeError, match=r"has its 2 node\(s\) already, or this node: number 1. If this is another run, give each "
                                        "its own port; else give each node its own `--node-rank`"):
        third.join(ASKED)
    unnumbered = [meet(nnodes=2, node=None, address="127.0.0.1", port=port) for _ in range(2)]
    assert [seat.node for seat in unnumbered] == [1, 2]
    with pytest.raises(ModeError, match="number 2"):
        unnumbered[1].join(ASKED)
    assert first.nnodes == 2


def test_a_node_that_does_not_come_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(meeting, "MEETING_S", 0.3)
    monkeypatch.setattr(meeting, "_NOTICE_S", 0.1)
    port = free_port()
    with pytest.raises(ModeError, match=f"After 0 s nobody answers at 127.0.0.1:{port}. Start node 0 there"):
        meet(nnodes=2, node=1, address="127.0.0.1", port=port)
    with pytest.raises(ModeError, match=f"1 of 2 nodes are at 127.0.0.1:{port}. Start the same command on every node"):
        meet(nnodes=2, node=0, address="127.0.0.1", port=port).join(ASKED)
    assert re.search(r"^twinkle: waiting; nobody answers .*\n.*waiting; 1 of 2 nodes are", capsys.readouterr().err)


def test_the_first_failure_of_an_attempt_is_what_all_nodes_hear_of() -> None:
    first, second, _ = both(free_port())
    for seat in (first, second):
        seat.next_rendezvous()
    assert first.failure() is None
    assert second.publish_failure({"what": "Rank 3 failed"}) == {"what": "Rank 3 failed", "node": 1}
    assert first.publish_failure({"what": "Rank 0 failed"}) == first.failure() == {"what": "Rank 3 failed", "node": 1}
    places = [seat.next_rendezvous().bootstrap_store_info for seat in (first, second)]
    assert places[0] is not None
    assert places[0] == places[1]
    assert places[0].master_port != first.port  # the next attempt does not meet the addresses of the dead
    assert first.failure() is None


def test_a_node_that_gives_no_sign_of_life_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: clock[0])
    first, second, _ = both(free_port())
    for seconds in (2, 2, 15):
        clock[0] += seconds
        assert (second.silent_node(), first.silent_node()) == (None, None)
    clock[0] += 19
    assert first.silent_node() is None
    clock[0] += 2
    assert first.silent_node() == 1


def test_nobody_has_finished_before_all_have() -> None:
    first, second, _ = both(free_port())
    for seat in (first, second):
        seat.next_rendezvous()
    assert not first.all_have_finished()
    assert not first.all_have_finished()
    assert second.all_have_finished()
    assert first.all_have_finished()


def test_the_interface_to_this_machine_is_the_loopback() -> None:
    expected = "lo" if os.uname().sysname == "Linux" else None
    assert meeting.interface_to("127.0.0.1", 80) == expected
