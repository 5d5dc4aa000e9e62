"""A service that is started again continues the training before it, or begins a new one."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, prorl
from support.services import PROCESS, Service, serving
from support.services import started as started_program
from support.waiting import until

from prorl_zmq import Job, RolloutClient, errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.services import Program

TOPOLOGY = PROCESS
ONE = Job(task="math", instance={"problem": "1 + 1?", "ground_truth": "2"})


def started(folder: Path, *flags: str) -> Service:
    service = Service(folder, TOPOLOGY, *flags)
    service.wait_ready()
    return service


def test_a_service_that_is_started_again_knows_the_weights_that_were_announced() -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        folder = Path(name)
        first = started(folder)
        try:
            with first.client() as client:
                client.set_weight_version(5)
        finally:
            first.close()
        again = started(folder)
        try:
            assert any("continuing the training that announced weights 5" in line for line in again.lines)
            with again.client() as client:
                until(lambda: [one.state for one in client.backends.list()] == ["behind"], "the engine to be behind")
                listed = again.run("backends", "list").stdout
                assert "behind" in listed
                assert "serves weights 0 where 5 are wanted" in " ".join(listed.split())
                job = Job(task=ONE.task, instance=ONE.instance, backend_wait_s=0.5)
                with client.open_batch(2, 4, keep="all", max_staleness=0, max_given_up=1, adopt=False) as batch:
                    batch.feed(repeat(job))
                    with pytest.raises(errors.BatchFailed, match="`prorl backends list` says why no backend takes"):
                        batch.next_group(60)
                again.run("backends", "set-version", "0", "--take-over")
                with client.open_batch(2, 4, keep="all", max_staleness=0, adopt=False) as batch:
                    batch.feed(repeat(ONE))
                    assert len(list(batch)) == 2
                client.set_weight_version(7)
        finally:
            again.close()
        new = started(folder, "--new-training")
        try:
            assert any("a new training: weights 7" in line for line in new.lines)
            with new.client() as client, client.open_batch(2, 4, keep="all", max_staleness=0) as batch:
                batch.feed(repeat(ONE))
                assert len(list(batch)) == 2
        finally:
            new.close()


class Machine:
    """A folder for temporary files of its own: services in it share the default run folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kept = {name: value for name, value in os.environ.items() if name not in ("PRORL_RUN_DIR", "PRORL_NAME")}
        self.environment = {**kept, "TMPDIR": str(root), "COLUMNS": "300"}
        self.shared = root / f"prorl-{os.getuid()}"

    def topology(self, name: str, model: str = "") -> Path:
        path = self.root / name
        model = f'\n[[backends]]\nmodel = "{model}"\n' if model else ""
        path.write_text(PROCESS + model)
        return path

    @contextmanager
    def serving(self, *flags: object) -> Iterator[Program]:
        with started_program("prorl", "serve", *flags, environment=self.environment) as program:
            program.wait_line("prorl serve: ready at")
            yield program

    def refused(self, *flags: object) -> str:
        with started_program("prorl", "serve", *flags, environment=self.environment) as program:
            assert program.wait() == 2
            return program.log

    def announce(self, folder: Path, version: int) -> None:
        with RolloutClient(f"ipc://{folder}/front_door", timeout_s=30) as client:
            client.set_weight_version(version)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        yield Machine(Path(name))


@pytest.mark.proof(quick=True)
def test_two_experiments_in_the_shared_folder_do_not_meet(machine: Machine) -> None:
    """No terminal: another topology file is refused by name, and weights of another model by any service."""
    first, second = machine.topology("a.toml"), machine.topology("b.toml")
    with machine.serving("--config", first):
        machine.announce(machine.shared, 5)
    said = machine.refused("--config", second)
    assert f"{machine.shared} has weights 5 of another training, of the embedded policy ({first})" in said
    assert "prorl serve --name NAME" in said
    assert "--new-training" in said
    with machine.serving("--config", first) as same:
        assert "continuing the training that announced weights 5" in same.log
    with machine.serving("--config", second, "--continue-training") as moved:
        assert "continuing the training that announced weights 5" in moved.log
    with machine.serving("--config", first, "--new-training") as new:
        assert "weights 5 of the one before are forgotten" in new.log


def test_a_service_has_a_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    config, other = machine.topology("a.toml"), machine.topology("b.toml", model="another.npz")
    with machine.serving("--config", config), machine.serving("--config", config, "--name", "math") as named:
        folder = Path(f"{machine.shared}-math")
        assert f"ready at ipc://{folder}/front_door" in named.log
        monkeypatch.setattr(tempfile, "tempdir", str(machine.root))
        with RolloutClient("math", timeout_s=30) as client:
            client.set_weight_version(3)
        for place in (("--name", "math"), ("--name", "math", "--config", config)):
            done = prorl("backends", "list", *place, environment=machine.environment)
            assert "behind" not in done.stdout
            assert " 3 " in done.stdout, done.stdout + done.stderr
        unnamed = prorl("backends", "list", environment=machine.environment)
        assert " 3 " not in unnamed.stdout
        by_variable = prorl("backends", "list", environment={**machine.environment, "PRORL_NAME": "math"})
        assert " 3 " in by_variable.stdout
        again = machine.refused("--config", config, "--name", "math")
        assert "another service or node runs in" in again
        listed = json.loads(prorl("services", "--json", environment=machine.environment).stdout)["services"]
        assert [(one["name"], one["running"], one["weights"], one["models"]) for one in listed] == [
            ("", True, 0, ["the embedded policy"]),
            ("math", True, 3, ["the embedded policy"]),
        ]
    said = machine.refused("--config", other, "--name", "math")
    assert "weights 3 of another training, of the embedded policy; this one is of another.npz" in said
    table = prorl("services", environment=machine.environment).stdout
    assert re.search(r"math +│ ended +│ +3 │ the embedded policy", table), table


def test_names_that_cannot_be(machine: Machine) -> None:
    for flags, variable, said in (
        (("--name", "a/b"), "", "--name 'a/b' cannot be a service's name"),
        ((), "../b", "$PRORL_NAME '../b' cannot be a service's name"),
        (("--name", "a", "--run-dir", "x"), "", "leave out --run-dir, or --name"),
        (("--name", "a", "--service", "x"), "", "--service DIR is the service's name"),
    ):
        environment = {**machine.environment, "PRORL_NAME": variable}
        assert said in complaint(prorl("serve", *flags, environment=environment))
    (machine.root / "wrong.toml").write_text('[service]\nname = "a b"\n')
    assert "service.name" in complaint(prorl("serve", "--config", machine.root / "wrong.toml"))
    gone = prorl("status", "--name", "gone", environment=machine.environment)
    assert "no process listens as gone" in gone.stderr
    assert "`prorl serve --name gone`" in gone.stderr


def test_a_second_trainer_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    """Also across a restart of the backend broker, in which the first one says nothing but that it lives."""
    with serving() as service, service.client("first") as first, service.client("second") as second:
        first.set_weight_version(5)
        acts: list[Callable[[], object]] = [
            lambda: second.set_weight_version(1),
            lambda: second.update_weights(tmp_path, 1),
            lambda: second.begin_weights(1),
            lambda: second.cancel_weights(5),
        ]
        for act in acts:
            with pytest.raises(errors.WeightsHeld, match="session first gives this service the weights") as found:
                act()
            assert found.value.session == "first"
        assert [one.backend.weight_version for one in second.backends.list()] == [5]
        said = complaint(service.run("backends", "set-version", "0"), code=1)
        assert "--take-over" in said
        os.kill(service.child("backend_broker.json"), signal.SIGKILL)
        until(lambda: held_by(service) == "first", "the first trainer to renew its lease")
        first.set_weight_version(6)
        second.set_weight_version(1, take_over=True)
        with pytest.raises(errors.WeightsHeld, match="session second"):
            first.set_weight_version(7)
        second.close()
        first.set_weight_version(7)
        assert service.run("backends", "set-version", "8", "--take-over").returncode == 0
        first.set_weight_version(9)


def held_by(service: Service) -> str:
    """Return who holds the weights, as a request says that changes nothing; empty: nobody."""
    with service.client("nosy") as nosy:
        try:
            nosy.cancel_weights(5)
        except errors.WeightsHeld as error:
            return str(error.session)
    return ""
