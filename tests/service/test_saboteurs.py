"""Policies that know their answer to be wrong, and do what they can not to be graded: they earn 0 all the same."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from beside import beside
from rootfs import root_filesystem

from prorl_zmq import EpisodeLimits, Job, PhaseLimits, RolloutClient
from prorl_zmq.service.child import ChildService
from prorl_zmq.tasks.swe_formats import eval_script

sys.path.append(str(Path(__file__).parents[1] / "stages"))
from swe_image import TEST_COMMAND, make_image

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.proof

TOPOLOGY = """\
backends = []
stage = [{{role = "init"}}, {{role = "run"}}, {{role = "eval"}}]

[sandbox]
kind = "{kind}"
image = {image}
image_folders = {folders}
"""
WAIT_S = 150.0
KILLER = r"""cat > /tmp/killer <<'END'
while :; do for each in /proc/[1-9]*; do
  each=${each#/proc/}; [ $each = 1 ] || [ $each = $$ ] || kill -9 $each
done; done
END
(setsid bash /tmp/killer </dev/null >/dev/null 2>&1 &)
sleep 5"""
FULL = "for each in $(seq 600); do sleep 1000 & done 2>/dev/null >&2"
WRECK = "rm -rf /bin /sbin /lib* /usr 2>/dev/null; kill -9 $$"
EDIT = ["str_replace_editor", {"command": "create", "path": "note", "file_text": "done"}]


class Sabotage(NamedTuple):
    turns: list[Any]
    """What the policy does, each a command of bash or a call."""
    ends: set[tuple[str, str]]
    """How its job may end: outcome and error code."""
    limits: PhaseLimits = PhaseLimits()
    metric: str = ""


DONE = {("completed", "")}
SABOTAGES = {
    "kills all that starts": Sabotage([KILLER, "echo here", EDIT], DONE),
    "fills the process table": Sabotage(
        [FULL, "echo here", EDIT, "echo here"], {*DONE, ("failed", "sandbox_limit_exceeded")}
    ),
    "lets the time pass": Sabotage(["sleep 1000"], {("timeout", "phase_timeout")}, PhaseLimits(run_s=8.0)),
    "detains the check": Sabotage(["touch slow"], DONE, PhaseLimits(eval_s=8.0), "check_timed_out"),
}
WRECKED = Sabotage([WRECK, "echo here"], {("failed", "sandbox_broken")})
CHECK = 'while [ -e slow ]; do sleep 0.1; done; [ "$(cat answer)" = 42 ]'


@contextmanager
def serving(folder: Path, kind: str, images: Path, speeches: dict[str, list[Any]]) -> Iterator[RolloutClient]:
    image = str(root_filesystem()) if kind == "apptainer" else ""
    topology = TOPOLOGY.format(kind=kind, image=json.dumps(image), folders=json.dumps([str(images)]))
    service = ChildService(folder, topology)
    said = folder / "speeches.json"
    calls = {name: [_call(turn) for turn in (*turns, "The end.")] for name, turns in speeches.items()}
    said.write_text(json.dumps(calls))
    engine = str(Path(__file__).with_name("knowing_engine.py"))
    with (
        service,
        beside([engine, f"ipc://{service.run_dir}/backend_broker", f"ipc://{folder}/engine", str(said)]),
        RolloutClient(service.front_door, timeout_s=60) as client,
    ):
        service.wait_ready(client)
        yield client


def wrecking_job(folder: Path) -> Job:
    image, before = make_image(folder)
    instance = {
        "instance_id": "wreck",
        "image": str(image),
        "directory": "/testbed",
        "problem_statement": "wreck: double(2) is 6",
        "base_commit": before,
        "fail_to_pass": ["tests/test_double.py::test_two"],
        "pass_to_pass": ["tests/test_double.py::test_zero"],
        "eval_script": eval_script(TEST_COMMAND, "/testbed"),
        "log_parser": "parse_log_pytest",
    }
    return Job(task="swe", job_id="wreck", instance=instance)


def _call(turn: Any) -> Any:
    return ["bash", {"command": turn}] if isinstance(turn, str) and turn != "The end." else turn


@pytest.mark.timeout(200)
def test_sabotage_earns_nothing_and_is_never_the_infrastructures_error(sandbox_kind: str, tmp_path: Path) -> None:
    if sandbox_kind == "process":
        pytest.skip("plain processes are not isolated: sabotage succeeds")
    speeches = {f"{name}:": sabotage.turns for name, sabotage in SABOTAGES.items()}
    tools = ["bash", "str_replace_editor"]
    jobs = [] if sandbox_kind != "apptainer" else [wrecking_job(tmp_path)]
    speeches["wreck:"] = WRECKED.turns
    jobs += [
        Job(
            task="shell",
            job_id=name.replace(" ", "-"),
            instance={"instruction": f"{name}: write 42 to answer.", "check": CHECK, "tools": tools},
            limits=sabotage.limits,
            episode=EpisodeLimits(tool_call_s=60.0),
        )
        for name, sabotage in SABOTAGES.items()
    ]
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as folder,
        serving(Path(folder), sandbox_kind, tmp_path, speeches) as client,
    ):
        client.submit(jobs)
        done = {each.job_id: each for each in client.stream(timeout_s=WAIT_S)}
    for name, sabotage in (SABOTAGES | ({"wreck": WRECKED} if sandbox_kind == "apptainer" else {})).items():
        one = done[name.replace(" ", "-")]
        end = (str(one.outcome), one.error.code if one.error is not None else "")
        assert end in sabotage.ends, (name, one.error)
        assert (one.reward, one.result.attempt) == (0.0, 1), name
        assert one.loss_mask.any(), name
        assert not sabotage.metric or one.result.metrics[sabotage.metric] == 1.0
