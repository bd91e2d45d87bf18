"""`--submit`: sends the script to a cluster as a Ray job and shows what it prints, until it ends.

The working directory goes along, so modules and small files beside the script are there; data and models are what the cluster's
machines have. Twinkle and its plugins must be installed on them.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

from twinkle_core.errors import ArgumentError, ModeError, first_line
from twinkle_core.settings import LaunchRequest


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
        job = client.submit_job(
            entrypoint=shlex.join(words), runtime_env={"working_dir": str(folder), "env_vars": request.to_environ()})
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


async def _show(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
