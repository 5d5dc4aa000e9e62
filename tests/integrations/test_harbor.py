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
from support.commands import prorl
from support.harbor_tasks import make_task
from support.sandboxes import default_image

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400)]
LIMIT_S = 300.0
TEST = """\
#!/bin/bash
grep -q hello /app/hello.txt && ! (: < /dev/tcp/127.0.0.1/3128) 2>/dev/null
echo $((! $?)) > /logs/verifier/reward.txt
"""


def run_harbor(folder: Path, agent: str, tmp_path: Path, *options: object) -> list[dict[str, float]]:
    """Run Harbor on task folders; return the rewards of its trials, in the order of their names."""
    python = Path(framework_python("harbor"))
    command = [python.with_name("harbor"), "run", "-y", "-p", folder, "-a", agent, "-o", tmp_path / "jobs"]
    command += ["-e", "prorl_zmq.integrations.harbor:Environment", *options]
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
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "jobs").glob("*/*/result.json"))]
    return [(each["verifier_result"] or {}).get("rewards", each["exception_info"]) for each in results]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbors_own_agents_earn_what_they_should(agent: str, reward: float, tmp_path: Path) -> None:
    usable("apptainer")
    image = default_image("apptainer")
    toml = '[environment]\ndocker_image = "debian"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
    make_task(tmp_path / "hello", toml, {"tests/test.sh": TEST})
    assert run_harbor(tmp_path / "hello", agent, tmp_path, "--ek", f"image={image}") == [{"reward": reward}]


def test_commands_are_where_and_whose_the_dockerfile_says(tmp_path: Path) -> None:
    usable("apptainer")
    dockerfile = "FROM debian:12\nRUN useradd worker && mkdir /work && chown worker /work\nWORKDIR /work\nUSER worker\n"
    solution = '#!/bin/bash\necho "$(id -un) $PWD ${HTTP_PROXY:-none}" > said\n'
    test = "#!/bin/bash\ngrep -qx 'worker /work none' said && test ! -e /graders\n"
    test += "echo $((! $?)) > /logs/verifier/reward.txt\n"
    files = {"environment/Dockerfile": dockerfile, "solution/solve.sh": solution, "tests/test.sh": test}
    no_network = '[environment]\nnetwork_mode = "no-network"\n'
    separate = 'artifacts = ["/work/said"]\n[verifier]\nenvironment_mode = "separate"\n'
    graders = "FROM debian:12\nRUN touch /graders\nWORKDIR /work\nCOPY test.sh /tests/test.sh\n"
    make_task(tmp_path / "set" / "a", no_network, dict(files))
    own = {"tests/test.sh": test.replace("test !", "test"), "tests/Dockerfile": graders}
    make_task(tmp_path / "set" / "b", separate + no_network, files | own)
    images = ("--images", tmp_path / "images", "--base", f"debian:12={default_image('apptainer')}")
    assert prorl("tasks", "images", tmp_path / "set", "--build", *images).returncode == 0
    rewards = run_harbor(tmp_path / "set", "oracle", tmp_path, "--ek", f"images={tmp_path / 'images'}")
    assert rewards == [{"reward": 1.0}] * 2
