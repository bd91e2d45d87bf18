"""`--submit`: sends the script to a cluster as a Ray job and shows what it prints, until it ends.

The working directory goes along, so modules and small files beside the script are there; data and models are what the cluster's
machines have. Twinkle and its plugins must be installed on them.
"""

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from twinkle_core.errors import ArgumentError, ModeError, first_line
from twinkle_core.settings import LaunchRequest

_YOUNG_S = 60


def submit(script: str, argv: Sequence[str], request: LaunchRequest, *, address: str | None, restarts: int) -> int:
    """Run `script` as a job of the cluster whose dashboard is at `address` and return 0 if it succeeded, else 1.

    Ctrl-C stops the job.

    Raises: `ModeError` if no cluster takes the job, `ArgumentError` for a script outside of the working directory.
    """
    folder = Path.cwd()
    path = Path(os.path.abspath(script))
    if not path.is_relative_to(folder):
        raise ArgumentError(f"`--submit` sends the working directory `{folder}`, and `{script}` lies outside of it. Change to the "
                            "folder of the script.")
    words = ["python", "-m", "twinkle_ray.attempt", str(restarts), str(path.relative_to(folder)), *argv]
    try:
        client = JobSubmissionClient(address)
        job = _send(client, shlex.join(words), {"working_dir": str(folder), "env_vars": request.to_environ()})
    except AuthenticationError as error:
        raise ModeError(f"The cluster at `{address}` wants a token: {first_line(error)} Set RAY_AUTH_MODE=token, and put its token "
                        "into `~/.ray/auth_token`.") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ModeError(f"No Ray cluster takes jobs at `{address or 'the default address'}`: {first_line(error)} Say where its "
                        "dashboard is: `--address http://HOST:8265`. Its head needs `ray[default]`.") from error
    print(f"Job {job} is running. Ctrl-C stops it.", file=sys.stderr)
    try:
        asyncio.run(_show(client, job))
    except KeyboardInterrupt:
        client.stop_job(job)
        raise
    status = client.get_job_status(job)
    if status == JobStatus.SUCCEEDED:
        return 0
    print(f"Job {job} ended as {status}: {client.get_job_info(job).message}", file=sys.stderr)
    return 1


def _send(client: JobSubmissionClient, command: str, environment: dict[str, Any]) -> str:
    """Return the number of the job. A cluster that has just started takes none yet, and is asked again for a while."""
    deadline = time.monotonic() + _YOUNG_S
    while True:
        try:
            return client.submit_job(entrypoint=command, runtime_env=environment)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)


async def _show(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
