"""The main job on this machine, start to end: `make quickstart` or `python -m jobs.quickstart [section.key=value ...]`.

Makes the small model if it is not there, joins the Ray cluster of this machine or starts one for as long as the job
runs, submits `jobs.train` to it as a Ray job, follows its log, and says where the results are. An earlier quickstart
is kept under another name.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from pathlib import Path

import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from jobs.cli import connect, read_recipe, run
from rl_actors.errors import RLActorsError

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = "jobs/configs/quickstart.yaml"
TIME_LIMIT_S = 3600.0
AGENT_WAIT_S = 120.0


def main() -> int:
    overrides = [f"run_dir={json.dumps(str(REPOSITORY / 'runs' / 'quickstart'))}", *sys.argv[1:]]
    # Makes the model here, with a progress bar, rather than within the job.
    config = read_recipe(str(REPOSITORY / RECIPE), overrides)
    dashboard = connect()
    if dashboard is None:
        raise RLActorsError("Ray runs here without its dashboard, which takes jobs: start it with `ray start --head`")
    print(f"Ray dashboard: {dashboard}", flush=True)
    client = JobSubmissionClient(dashboard)
    command = [sys.executable, "-m", "jobs.train", RECIPE, *overrides, "checkpoint.resume=never"]
    # Named, because Ray lets a job join any cluster of this machine.
    address = ray.get_runtime_context().gcs_address
    job = submit(client, f"RAY_ADDRESS={address} {shlex.join(command)}")
    try:
        asyncio.run(asyncio.wait_for(follow(client, job), TIME_LIMIT_S))
    except BaseException:
        client.stop_job(job)
        raise
    if (status := client.get_job_status(job)) != JobStatus.SUCCEEDED:
        raise RLActorsError(f"the job {job} ended as {status}: {client.get_job_info(job).message}")
    summary = json.loads((config.run_path / "summary.json").read_text())
    print(f"held-out reward {summary['eval_before']:.3f} -> {summary['eval_after']:.3f} in {summary['wall_s']:.0f} s")
    print(f"curve: {config.run_path / 'reward_curve.png'}\nsummary: {config.run_path / 'summary.json'}")
    return 0


def submit(client: JobSubmissionClient, entrypoint: str) -> str:
    """Submit the job; a cluster that was started a moment ago takes some seconds until it accepts one."""
    deadline = time.monotonic() + AGENT_WAIT_S
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": str(REPOSITORY)})
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise RLActorsError(f"Ray did not take the job: {error}") from error
            if time.monotonic() > deadline:
                raise RLActorsError(
                    f"Ray's agent, which starts jobs, did not come up within {AGENT_WAIT_S:g} s: look into "
                    "dashboard_agent.log of the session in /tmp/ray, or restart this machine's cluster"
                ) from error
            time.sleep(1)


async def follow(client: JobSubmissionClient, job: str) -> None:
    """Print the job's log until it ends."""
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


if __name__ == "__main__":
    run(main)
