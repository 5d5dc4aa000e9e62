"""Kubernetes manifests: checked against the published schemas, strictly. They were not run on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from prorl_zmq.config import load_topology
from prorl_zmq.errors import ConfigError
from prorl_zmq.service.manifests import ENDPOINTS, STOP_S, ManifestOptions, render

if TYPE_CHECKING:
    from pathlib import Path

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
        ({"autoscale": (2, 100)}, {"Deployment", "HorizontalPodAutoscaler"}),
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
    text = f'  # indented, with "quotes" and {{{{ braces }}}}\n{ENDPOINTS}\n[[stage]]\nrole = "run"\nslots = 48\n'
    text += '[[backends]]\nkind = "vllm"\nmodel = "m"\ncount = 2\ngpus = [0, 1, 2, 3]\n'
    config = tmp_path / "topology.toml"
    config.write_text(text)
    found = documents(config, autoscale=(2, 9))
    written = tmp_path / "written.toml"
    written.write_text(found[("ConfigMap", "prorl-topology")]["data"]["topology.toml"])
    assert written.read_text() == text
    assert load_topology(written) == load_topology(config)
    (node,) = pod(found[("Deployment", "prorl-nodes")])["containers"]
    assert node["resources"]["limits"] == {"nvidia.com/gpu": 4}
    (metric,) = found[("HorizontalPodAutoscaler", "prorl-nodes")]["spec"]["metrics"]
    assert metric["external"]["target"]["averageValue"] == "48"
    assert "replicas" not in found[("Deployment", "prorl-nodes")]["spec"]


def test_kubernetes_waits_for_as_long_as_a_node_drains() -> None:
    nodes = pod(documents(drain_s=1234)[("Deployment", "prorl-nodes")])
    assert nodes["terminationGracePeriodSeconds"] == 1234 + STOP_S
    assert "--drain-s 1234\n" in nodes["containers"][0]["args"][0]


def test_plain_processes_need_no_rights_of_a_sandbox(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text(f'{ENDPOINTS}\n[sandbox]\nkind = "process"\n')
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


def test_endpoints_that_other_pods_cannot_reach(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text('[rollout_broker]\nfront_door = "tcp://127.0.0.1:5555"\n')
    with pytest.raises(ConfigError, match=r"cannot reach tcp://127\.0\.0\.1:5555, ipc://.*has to have") as caught:
        render(ManifestOptions(image=IMAGE), config)
    assert ENDPOINTS in caught.value.message
