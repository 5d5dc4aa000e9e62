from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_zmq.cluster.cluster_file import load_cluster_file
from prorl_zmq.errors import ConfigError
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, text: str) -> Path:
    (folder / "cluster.toml").write_text(text)
    return folder / "cluster.toml"


def test_an_empty_file_asks_for_one_node_of_the_default_partition(tmp_path: Path) -> None:
    cluster = load_cluster_file(written(tmp_path, ""))
    assert (cluster.nodes.count, cluster.nodes.limit, cluster.engines.count, cluster.brokers) == (1, 2, 0, "here")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text("")
    (tmp_path / "own").mkdir()
    cluster = load_cluster_file(
        written(tmp_path, 'topology = "topology.toml"\ntemplates = "own"\n[nodes]\nslots = { run = 32 }')
    )
    assert (cluster.topology, cluster.templates) == (f"{tmp_path}/topology.toml", f"{tmp_path}/own")
    assert cluster.nodes.slots == {Phase.RUN: 32}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = ", "is not TOML"),
        ("[nodes]\nxyz = 4", "unknown field `xyz` in nodes; its keys are count, "),
        ("[nodes]\ncpu = 4", "unknown field `cpu` in nodes; did you mean `cpus`?"),
        ("[node]\ncount = 4", "unknown field `node`; did you mean `nodes`?"),
        ("[nodes]\ncount = 4\nmax_nodes = 2", "nodes.count is 4, beyond max_nodes, 2"),
        ("[nodes]\ncount = 0", "`int` >= 1 in nodes.count"),
        ('[nodes]\npartition = "cpu --x"', "matching regex"),
        ("[nodes]\nslots = { sleep = 1 }", "'sleep' in nodes.slots.sleep"),
        ('brokers = "cloud"', "Invalid enum value 'cloud' in brokers; allowed are here, job"),
        ('topology = "none.toml"', "No such file"),
        ('templates = "none"', "there is no folder"),
        ('[nodes]\nimages = ["tools.sif"]', "there is no tools.sif; name absolute paths"),
        ('setup = ["a\\nb"]', "matching regex"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster_file(written(tmp_path, text))
    assert said in caught.value.message


def test_an_image_is_not_run_from_the_shared_file_system(tmp_path: Path) -> None:
    image = tmp_path / "tools.sif"
    image.write_text("")
    cluster = written(tmp_path, f'topology = "t.toml"\n[nodes]\nimages = ["{image}"]\nimage_folder = "/tmp/own"')
    (tmp_path / "t.toml").write_text(f'[sandbox]\nimage = "{image}"')
    with pytest.raises(ConfigError, match=r'write image = "/tmp/own/tools.sif" in the topology'):
        load_cluster_file(cluster)
    (tmp_path / "t.toml").write_text("")
    with pytest.raises(ConfigError, match=r"name /tmp/own in image_folders"):
        load_cluster_file(cluster)
    for right in ('image = "/tmp/own/tools.sif"', 'image_folders = ["/tmp/own"]'):
        (tmp_path / "t.toml").write_text(f"[sandbox]\n{right}")
        assert load_cluster_file(cluster).nodes.images == (str(image),)
