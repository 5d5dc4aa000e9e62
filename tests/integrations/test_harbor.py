"""`harbor run`, the real one, with our sandboxes: its oracle and its no-op agent, and its own network policies."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import vllm_python
from framework_python import framework_python
from needed import usable
from support.harbor_tasks import make_task
from support.sandboxes import default_image

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400)]
LIMIT_S = 300.0
TEST = """\
#!/bin/bash
grep -q hello /app/hello.txt && ! (: < /dev/tcp/127.0.0.1/3128) 2>/dev/null
echo $((! $?)) > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbors_own_agents_earn_what_they_should(agent: str, reward: float, tmp_path: Path) -> None:
    usable("apptainer")
    python = Path(framework_python("harbor"))
    image = Path(default_image("apptainer"))
    toml = '[environment]\ndocker_image = "debian"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
    make_task(tmp_path / "hello", toml, {"tests/test.sh": TEST})
    command = [python.with_name("harbor"), "run", "-y", "-p", tmp_path / "hello", "-a", agent, "-o", tmp_path / "jobs"]
    command += ["-e", "prorl_zmq.integrations.harbor:Environment", "--ek", f"image={image}"]
    environment = {**os.environ, **vllm_python.environment(tmp_path), "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "jobs").glob("*/hello*/result.json")
    assert json.loads(result.read_text())["verifier_result"]["rewards"] == {"reward": reward}
