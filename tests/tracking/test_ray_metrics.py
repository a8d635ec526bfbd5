"""What RayMetrics records arrives at the node's Prometheus endpoint, with its tags."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest

from rl_actors.tracking.ray_metrics import RayMetrics
from rl_actors.tracking.records import EvalRecord, StepRecord


def report() -> None:
    metrics = RayMetrics("quickstart")
    metrics.stage("update", "trainer", 1.5)
    metrics.stage("rollout", "rollout", 0.2)
    metrics.step(StepRecord(step=3, version=3, reward_mean=0.5, tis={"mean": 0.9}, kl=math.nan))
    metrics.evaluation(EvalRecord(step=3, value=0.75))


def test_without_a_cluster_nothing_happens() -> None:
    report()


# A process and a cluster of its own: other tests share theirs.
CLUSTER = f"""
import sys, time, urllib.request
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
import ray
from test_ray_metrics import report

for attempt in range(3):
    try:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
                 _system_config={{"metrics_report_interval_ms": 500}})
        break
    except Exception as error:  # Ray 2.60 gives a node 30 s to start, which a crowded machine may not keep
        if attempt == 2 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
(node,) = ray.nodes()
report()
deadline, text = time.monotonic() + 60, ""
while time.monotonic() < deadline and "rl_actors_eval_reward" not in text:
    time.sleep(0.5)
    try:
        address = f"http://{{node['NodeManagerAddress']}}:{{node['MetricsExportPort']}}/metrics"
        text = urllib.request.urlopen(address, timeout=5).read().decode()
    except OSError:
        pass
print(text)
ray.shutdown()
"""


def test_gauges_and_histograms_reach_prometheus() -> None:
    child = subprocess.run([sys.executable, "-c", CLUSTER], capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    lines = re.findall(r"^ray_(rl_actors_\w+)\{(.*)\} (\S+)$", child.stdout, re.MULTILINE)
    seen = {name: (dict(re.findall(r'(\w+)="([^"]*)"', tags)), float(value)) for name, tags, value in lines}
    for name, pool, value in [
        ("rl_actors_update_seconds_count", "trainer", 1),
        ("rl_actors_update_last_seconds", "trainer", 1.5),
        ("rl_actors_rollout_seconds_sum", "rollout", 0.2),
        ("rl_actors_reward_mean", "driver", 0.5),
        ("rl_actors_tis_mean", "driver", 0.9),
        ("rl_actors_eval_reward", "rollout", 0.75),
    ]:
        tags, number = seen[name]
        assert (tags["run"], tags["pool"]) == ("quickstart", pool)
        assert number == pytest.approx(value)
    assert "rl_actors_kl" not in seen, "a number that the run does not have is no metric"
