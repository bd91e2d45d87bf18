"""What the processes of the pool run: `python -m suite.worker LIFELINE SOCKET...`.

The first process imports everything once and forks a rank for each socket. A rank waits for jobs, runs each in a session of its
own, with the environment that torchrun would give it, and answers. All end when the other end of LIFELINE is closed, which also
happens when whoever holds it is killed.
"""

import contextlib
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core import session

_IMPORTS = ("transformers", "peft", "twinkle.model", "twinkle.dataloader", "suite.training", "torch.distributed.pipelining",
            "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
            "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.qwen3_5.modeling_qwen3_5")


def main() -> None:
    """Fork the ranks and wait until nobody needs them."""
    lifeline, sockets = int(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    for name in _IMPORTS:
        importlib.import_module(name)
    torch.set_num_threads(1)
    for own in sockets:
        if os.fork() == 0:
            for other in sockets:
                if other != own:
                    os.close(other)
            threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
            _serve(Connection(own))
            os._exit(0)
    for number in sockets:
        os.close(number)
    os.read(lifeline, 1)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _serve(connection: Connection) -> None:
    before = dict(os.environ)
    while True:
        try:
            function, arguments, environ = connection.recv()
        except EOFError:
            return
        connection.send(_answer(function, arguments, environ))
        os.environ.clear()
        os.environ.update(before)


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], environ: Mapping[str, str]) -> tuple[bool, Any]:
    """Return (True, what the function returned) or (False, the traceback of what it raised)."""
    os.environ.update(environ)
    try:
        return True, function(*arguments)
    except BaseException:  # noqa: BLE001  the boundary of a process: the pool raises it
        return False, traceback.format_exc()
    finally:
        session.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


if __name__ == "__main__":
    main()
