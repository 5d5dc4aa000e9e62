"""Kubernetes manifests: checked against the published schemas, strictly. They were not run on a cluster."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from needed import lacking, usable
from rootfs import root_filesystem

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.config import load_topology
from prorl_zmq.errors import ConfigError
from prorl_zmq.service import manifests
from prorl_zmq.service.manifests import BROKERS_HOST, STOP_S, ManifestOptions, render, secrets
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.tools.images.definition import load_definition
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SETUP_FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
VERSIONS = ("1.36", "1.37")
IMAGE = "registry.example/prorl:0.1"


def documents(config: Path | None = None, **options: Any) -> dict[tuple[str, str], Any]:
    """Render, check and return manifests by their kind and name."""
    found = [*yaml.safe_load_all(render(ManifestOptions(image=IMAGE, **options), config))]
    for document in found:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def pod(document: Any) -> Any:
    return document["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"Deployment"}),
        ({"nodes": 500, "images_claim": "prorl-images"}, {"Deployment"}),
        ({"every_machine": True}, {"DaemonSet"}),
    ],
)
def test_all_shapes_are_what_kubernetes_takes(options: dict[str, Any], kinds: set[str]) -> None:
    found = documents(**options)
    assert {kind for kind, _ in found} == {"ConfigMap", "Service", "StatefulSet", *kinds}


def test_the_check_is_strict() -> None:
    found = documents()[("Deployment", "prorl-nodes")]
    for change in ({"replicas": "many"}, {"replcas": 2}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**found, "spec": {**found["spec"], **change}}, VERSIONS[0], strict=True)


def test_the_topology_comes_through_unchanged(tmp_path: Path) -> None:
    text = '  # indented, with "quotes" and {{ braces }}\n\n[[stage]]\nrole = "run"\nslots = 48\n'
    text += '[[backends]]\nkind = "vllm"\nmodel = "m"\ncount = 2\ngpus = [0, 1, 2, 3]\n'
    config = tmp_path / "topology.toml"
    config.write_text(text)
    found = documents(config)
    written = tmp_path / "written.toml"
    written.write_text(found[("ConfigMap", "prorl-topology")]["data"]["topology.toml"])
    assert written.read_text() == text
    assert load_topology(written) == load_topology(config)
    (node,) = pod(found[("Deployment", "prorl-nodes")])["containers"]
    assert node["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_kubernetes_waits_for_as_long_as_a_node_drains() -> None:
    nodes = pod(documents(drain_s=1234)[("Deployment", "prorl-nodes")])
    assert nodes["terminationGracePeriodSeconds"] == 1234 + STOP_S
    assert "--drain-s 1234\n" in nodes["containers"][0]["args"][0]


def test_plain_processes_need_no_rights_of_a_sandbox(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text('[sandbox]\nkind = "process"\n')
    nodes = pod(documents(config)[("Deployment", "prorl-nodes")])
    assert "hostUsers" not in nodes
    assert nodes["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}
    assert pod(documents()[("Deployment", "prorl-nodes")])["hostUsers"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "two words"}, "--image 'two words': write it as in --image registry.example/prorl:0.1"),
        ({"cpu": "many"}, "--cpu 'many': write it as in --cpu 16"),
        ({"memory": "64 GB"}, "--memory '64 GB': write it as in --memory 64Gi"),
        ({"images_claim": "A_b"}, "--images-claim 'A_b': write it as in --images-claim prorl-images"),
    ],
)
def test_wrong_options(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match="write it as") as caught:
        ManifestOptions(**{"image": IMAGE, **options})
    assert caught.value.message == said


def test_each_broker_has_ports_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text("[service]\nrollout_brokers = 3\n")
    found = documents(config)
    records = [json.loads(text) for text in found[("ConfigMap", "prorl-brokers")]["data"].values()]
    endpoints = [endpoint for record in records for endpoint in record["endpoints"].values()]
    assert [record["name"] for record in records] == ["rollout-0", "rollout-1", "rollout-2", "backends"]
    assert endpoints == [f"tcp://{BROKERS_HOST}:{port}" for port in range(5555, 5562)]
    assert [port["port"] for port in found[("Service", "prorl")]["spec"]["ports"]] == [*range(5555, 5562)]


@contextmanager
def container(
    pod: Any, mounts: Path, environment: dict[str, str], runtime: tuple[str, ...]
) -> Iterator[subprocess.Popen[str]]:
    """Run what a pod's container runs, with what is mounted there in a folder instead.

    Args:
        runtime: the words before the command: of a container runtime, or none.
    """
    (one,) = pod["containers"]
    (script,) = one["args"]
    (folder,) = [variable["value"] for variable in one["env"] if variable["name"] == "PRORL_SERVICE"]
    place = mounts / Path(folder).relative_to("/")
    command = [*runtime, *one["command"], script.replace("/mnt/", f"{mounts}/")]
    with subprocess.Popen(
        command, env={**environment, "PRORL_SERVICE": str(place)}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_both_recipes_of_the_image_have_one_base() -> None:
    docker = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    (base,) = re.findall(r"^ARG BASE=docker\.io/library/(\S+)$", docker, re.MULTILINE)
    definition = load_definition(ROOT / "deploy" / "prorl.def.j2", {})
    assert definition.bases == (("docker", base),)
    for text, wheels in ((docker, "source=dist/wheels"), (definition.text, "../dist/wheels /opt")):
        assert wheels in text
        assert "sh /opt/install.sh" in text
        assert "bubblewrap" in text


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the service's image by deploy/prorl.def.j2, from `make wheels` and a Debian with Python."""
    usable("apptainer")
    base = root_filesystem()
    source = tmp_path_factory.mktemp("source")
    for name in ("Makefile", "prorl_zmq", "brokers", "stages", "tools", "deploy", *SETUP_FILES):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    made = subprocess.run(
        ["make", "wheels", f"VENV={sys.prefix}"], cwd=source, capture_output=True, text=True, check=False
    )
    if made.returncode:
        lacking("network", f"no wheels from the package index: {made.stderr}")
    store = ImageStore(source / "images")
    variables = {"bootstrap": "localimage", "base": str(base), "packages": ""}
    built = store.build(str(source / "deploy" / "prorl.def.j2"), "prorl", mode="scratch", variables=variables)
    return built.image.path


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["host", "image"])
def test_what_the_containers_run_makes_a_service(
    place: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Both pods' scripts: brokers bind at the fixed ports, a node finds them by name, a job passes.

    On the host, `prorl` is that of the tests; in the image, the programs are the image's alone.
    """
    files = request.getfixturevalue("image") if place == "image" else None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(manifests, "FIRST_PORT", port)
    monkeypatch.setattr(manifests, "BROKERS_HOST", "localhost")
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name, ExitStack() as pods:
        folder = Path(name)
        config = folder / "topology.toml"
        config.write_text('[sandbox]\nkind = "process"\n')
        keys = ServiceFolder.create(folder / "keys-of-all", config)
        made = {item["metadata"]["name"]: item for item in json.loads(secrets(keys.path))["items"]}
        for secret in made.values():
            kubernetes_validate.validate(secret, VERSIONS[0], strict=True)
        found = documents(config)
        prorl = folder / "bin" / "prorl"
        prorl.parent.mkdir()
        prorl.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m prorl_zmq.cli prorl "$@"\n')
        prorl.chmod(0o755)
        runtime = ("apptainer", "--quiet", "exec", "--contain", "--no-home", "--pwd", "/", "--bind", name, str(files))
        environment = {
            **os.environ,
            "PATH": f"{prorl.parent}:{os.environ['PATH']}",
            "TMPDIR": name,
            "POD_IP": "127.0.0.1",
            "POD_NAME": "prorl-nodes-1",
        }
        processes = []
        for part, document in (("service", ("StatefulSet", "prorl-brokers")), ("node", ("Deployment", "prorl-nodes"))):
            mounts = folder / part
            for kind in ("topology", "brokers"):
                (mounts / kind).mkdir(parents=True)
                for file, text in found[("ConfigMap", f"prorl-{kind}")]["data"].items():
                    (mounts / kind / file).write_text(text)
            (mounts / "keys").mkdir()
            (mounts / "keys" / "keys.tar").write_bytes(base64.b64decode(made[f"prorl-keys-{part}"]["data"]["keys.tar"]))
            processes.append(
                pods.enter_context(container(pod(found[document]), mounts, environment, runtime if files else ()))
            )
        with RolloutClient(f"tcp://127.0.0.1:{port}", keys=keys.keys("client"), timeout_s=60) as client:
            client.submit(
                Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
            )
            assert [trajectory.outcome for trajectory in client.stream(timeout_s=60)] == ["completed"]
            assert {stage.node for stage in client.status().stages} == {"prorl-nodes-1"}
        assert not (folder / "node/tmp/service/keys/service").exists()
        (brokers,) = pod(found[("StatefulSet", "prorl-brokers")])["containers"]
        (volume,) = [mount["mountPath"] for mount in brokers["volumeMounts"] if mount["name"] == "journal"]
        journals = (folder / "service" / volume.lstrip("/")).rglob("*.journal")
        assert {journal.name for journal in journals} == {"rollout-0.journal", "backends.journal"}
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
