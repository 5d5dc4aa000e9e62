"""Real builds of Dockerfiles by Apptainer, without a network."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from rootfs import tiny_root_filesystem

from prorl_zmq.errors import ConfigError, SandboxFailed
from prorl_zmq.tools.images.image_store import ImageStore
from prorl_zmq.tools.images.sources import parse_base

from .conftest import IMAGE, USER, needs_apptainer, needs_root, python_as_user

pytestmark = [needs_apptainer, pytest.mark.proof, pytest.mark.timeout(600)]
PROGRAMS = ("chmod", "chown", "cp", "env", "gzip", "id", "ln", "rmdir", "setpriv", "tar")
"""What builds need beyond a tiny root filesystem."""
DOCKERFILE = r"""# syntax=docker/dockerfile:1
ARG TAG=12
FROM debian:${TAG} AS tools
RUN mkdir -p /opt/tool && echo 'echo tool' > /opt/tool/run && ln -s run /opt/tool/link && chmod 755 /opt/tool/run \
    && chown 7:8 /opt/tool/run
COPY <<EOF <<'RAW' /opt/
value of TAG is "${TAG:-unset}"
EOF
costs $5 `no`
RAW

FROM debian:12
ARG TAG
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV GREETING="hello 'you'" PATH=/opt/tool:$PATH \
    SECOND=${GREETING:-none}
ENV OLD some words
ENV PRICE='5$ "q" \\`'
RUN echo "agent:x:1234:1234::/home/agent:/bin/sh" >> /etc/passwd && echo "order 1" > /log
WORKDIR /srv
WORKDIR app
COPY data/*.txt notes/
COPY --chown=agent --chmod=640 data/a.txt one.txt
COPY data .
RUN echo "order 2: $(cat one.txt) $GREETING $SECOND $OLD" >> /log && rm a.txt && mkdir late
COPY data/a.txt late
COPY --from=tools /opt/tool /opt/tool
COPY --from=0 /opt/EOF /opt/RAW /opt/
ADD packed.tar.gz /unpacked
USER agent
WORKDIR /home/agent/work
RUN <<'SCRIPT'
echo "order 3: $(id -un) $HOME $PWD" > mine
SCRIPT
RUN cat > also <<WORDS
from $GREETING
WORDS
RUN ["/bin/sh", "-c", "run >> mine"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    (folder / "data" / "inner").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "inner/c", ".hidden", "ignored"):
        (folder / "data" / name).write_text(name)
    (folder / "data" / "b.txt").chmod(0o664)
    (folder / "data" / "link").symlink_to("inner/c")
    (folder / ".dockerignore").write_text("# not these\ndata/ign*\n")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(folder / "packed.tar.gz", "w:gz") as tar:
        tar.add(folder / "data" / "a.txt", "deep/a")
    return folder


def test_instructions_are_carried_out_in_their_order(folder: Path, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    base = parse_base(str(tiny_root_filesystem(tmp_path / "tiny", *PROGRAMS)))
    built = store.build(str(folder / "Dockerfile"), "mine", bases={"docker.io/library/debian:12": base})
    root = built.image.path
    assert (root / "log").read_text() == "order 1\norder 2: a.txt hello 'you' none some words\n"
    app = root / "srv" / "app"
    assert {each.name for each in app.iterdir()} == {"notes", "one.txt", "b.txt", "inner", ".hidden", "link", "late"}
    assert {each.name for each in (app / "notes").iterdir()} == {"a.txt", "b.txt"}
    assert (app / "late" / "a.txt").read_text() == "a.txt"
    assert (app / "link").readlink() == Path("inner/c")
    one = (app / "one.txt").stat()
    assert (stat.S_IMODE(one.st_mode), one.st_uid, one.st_gid) == (0o640, 1234, 1234)
    b = (app / "b.txt").stat()
    assert (stat.S_IMODE(b.st_mode), b.st_uid) == (0o664, 0)
    assert (root / "opt/tool/link").readlink() == Path("run")
    assert ((root / "opt/tool/run").stat().st_uid, (root / "opt/tool/run").stat().st_gid) == (7, 8)
    assert (root / "opt/EOF").read_text() == 'value of TAG is "unset"\n'
    assert (root / "opt/RAW").read_text() == "costs $5 `no`\n"
    assert (root / "unpacked/deep/a").read_text() == "a.txt"
    work = root / "home/agent/work"
    assert work.stat().st_uid == 1234
    assert (work / "mine").read_text() == "order 3: agent /home/agent /home/agent/work\ntool\n"
    assert (work / "also").read_text() == "from hello 'you'\n"
    assert not list(root.glob(".prorl*"))
    assert (root / ".singularity.d/prorl.directory").read_text() == "/home/agent/work\n"
    shown = subprocess.run(
        [
            "apptainer",
            "exec",
            "--cleanenv",
            str(root),
            "sh",
            "-c",
            'printf "%s|%s|%s\\n" "$GREETING" "$OLD" "$PRICE"; run',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "hello 'you'|some words|5$ \"q\" \\\\`\ntool\n"
    assert store.build(str(folder / "Dockerfile"), "mine", bases={"debian:12": base}).reused
    _on_top(store, built.image.path, tmp_path)


def _on_top(store: ImageStore, below: Path, tmp_path: Path) -> None:
    """An image that begins with a built one has its variables, WORKDIR and USER."""
    file = tmp_path / "top" / "Dockerfile"
    file.parent.mkdir()
    file.write_text('FROM mine\nRUN echo "$GREETING $PWD $(id -un)" > top\nUSER root\nRUN exit 3\n')
    with pytest.raises(SandboxFailed, match="Dockerfile, line 4: RUN exit 3 failed"):
        store.build(str(file), "top", bases={"mine": parse_base(str(below))})
    assert store.find("top") is None
    file.write_text(file.read_text().replace("RUN exit 3\n", ""))
    root = store.build(str(file), "top", bases={"mine": parse_base(str(below))}).image.path
    assert (root / "home/agent/work/top").read_text() == "hello 'you' /home/agent/work agent\n"
    shutil.rmtree(file.parent)


HOSTILE = r"""FROM small AS one
COPY word /tmp/word
FROM one
COPY --from=other /etc/word /other
RUN cat /tmp/word > /seen
RUN cat /proc/*/environ /proc/*/rootFOLDER/secret > /leaked 2> /dev/null; \
    for place in /root /tmp /var/tmp FOLDER /proc/1/root/root /proc/1/rootFOLDER /proc/$PPID/root/root; do \
        (mkdir -p $place; echo x > $place/MARK) 2> /dev/null; done; \
    for each in /.prorl /.prorl/*; do \
        mount -o remount,rw,bind $each && echo x > $each/MARK; done 2> /dev/null; \
    for each in /proc/sys /sys /dev /tmp /var/tmp /root; do umount -l $each; echo x > $each/MARK; done 2> /dev/null; \
    mount -o remount,rw,bind /proc/sys; echo x > /proc/sys/kernel/core_pattern; \
    mknod /disk b 254 0 || echo no device; kill -9 HOSTS_PID; true
"""


@needs_root
def test_a_run_of_roots_changes_and_reads_nothing_outside_of_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of base images, the machine's folders and its kernel's settings stay as they were."""
    programs = (*PROGRAMS, "mknod", "mount", "umount", "kill")
    bases = {name: tiny_root_filesystem(tmp_path / name, *programs) for name in ("small", "other")}
    file, mark = tmp_path / "environment" / "Dockerfile", f"planted-{os.getpid()}"
    file.parent.mkdir()
    (file.parent / "word").write_text("hello\n")
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("SERVICE_KEY", "secret")
    text = HOSTILE.replace("FOLDER", str(tmp_path)).replace("MARK", mark).replace("HOSTS_PID", str(os.getpid()))
    file.write_text(text)
    pattern = Path("/proc/sys/kernel/core_pattern")
    before = pattern.read_bytes()
    sources = {name: parse_base(str(path)) for name, path in bases.items()}
    root = ImageStore(tmp_path / "images").build(str(file), "mine", bases=sources).image.path
    assert pattern.read_bytes() == before
    places = (Path.home(), Path("/tmp"), Path("/var/tmp"), tmp_path, file.parent, *bases.values())
    assert [place for place in places if (place / mark).exists()] == []
    assert ((root / "root" / mark).read_text(), (root / "seen").read_text()) == ("x\n", "hello\n")
    assert (root / "other").read_text() == "hello\n"
    assert "secret" not in (root / "leaked").read_text()
    assert not (root / "disk").exists()


@needs_root
def test_an_unprivileged_user_builds(user_folder: Path) -> None:
    tiny_root_filesystem(user_folder / "base", *PROGRAMS)
    environment = user_folder / "environment"
    environment.mkdir()
    (environment / "word").write_text("hello\n")
    (environment / "Dockerfile").write_text(
        "FROM small AS one\nWORKDIR /app\nCOPY word .\n"
        "FROM small\nCOPY --from=one /app /app\nRUN cat /app/word > /seen && cp /seen /tmp/planted-by-a-user\n"
    )
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(user_folder)], check=True)
    build = [*IMAGE, "build", "environment/Dockerfile", "--name", "mine", "--images", "images", "--base", "small=base"]
    done = python_as_user(user_folder, *build)
    assert done.returncode == 0, done.stderr
    root = user_folder / "images" / "mine"
    assert (root / "seen").read_text() == (root / "tmp" / "planted-by-a-user").read_text() == "hello\n"
    assert not Path("/tmp/planted-by-a-user").exists()


def write_archive(root: Path, folder: Path) -> tuple[str, str]:
    """Write a root filesystem as other programs save images: as `docker save` does, and as an OCI layout."""
    folder.mkdir()
    with tarfile.open(folder / "layer.tar", "w") as tar:
        tar.add(root, ".")
    layer = (folder / "layer.tar").read_bytes()
    config = {
        "architecture": "arm64" if platform.machine() == "aarch64" else "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin:/usr/bin", "FROM_BASE=yes"], "WorkingDir": "/srv"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(
        json.dumps([{"Config": "config.json", "RepoTags": ["small:1"], "Layers": ["layer.tar"]}])
    )
    with tarfile.open(folder / "saved.tar", "w") as tar:
        for name in ("manifest.json", "config.json", "layer.tar"):
            tar.add(folder / name, name)
    blobs = folder / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    kind = "application/vnd.oci.image"

    def blob(content: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": f"{kind}.{media}", "digest": f"sha256:{digest}", "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": blob((folder / "config.json").read_bytes(), "config.v1+json"),
        "layers": [blob(layer, "layer.v1.tar")],
    }
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (folder / "layout" / "index.json").write_text(json.dumps(index))
    (folder / "layout" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return f"docker-archive:{folder}/saved.tar", f"oci:{folder}/layout"


def test_bases_that_other_programs_wrote(tmp_path: Path) -> None:
    root = tiny_root_filesystem(tmp_path / "tiny", *PROGRAMS)
    saved, layout = write_archive(root, tmp_path / "archives")
    file = tmp_path / "environment" / "Dockerfile"
    file.parent.mkdir()
    file.write_text('FROM one:1\nCOPY --from=two:2 /etc/word /word\nRUN echo "$FROM_BASE" > /seen\n')
    store = ImageStore(tmp_path / "images")
    bases = {"one:1": parse_base(saved), "two:2": parse_base(layout)}
    built = store.build(str(file), "mine", bases=bases).image.path
    assert ((built / "word").read_text(), (built / "seen").read_text()) == ("hello\n", "yes\n")
    assert (store.build(layout, "other").image.path / "etc" / "word").read_text() == "hello\n"


def test_what_cannot_be_copied_into_a_build_is_named(tmp_path: Path) -> None:
    file = tmp_path / "environment" / "Dockerfile"
    file.parent.mkdir()
    file.write_text("FROM one\n")
    bases = {"one": parse_base(str(tiny_root_filesystem(tmp_path / "tiny")))}
    with pytest.raises(ConfigError, match="the images are kept inside"):
        ImageStore(file.parent / "images").build(str(file), "mine", bases=bases)
    shutil.rmtree(file.parent / "images")
    os.mkfifo(file.parent / "pipe")
    with pytest.raises(SandboxFailed, match="environment/pipe cannot be copied"):
        ImageStore(tmp_path / "images").build(str(file), "mine", bases=bases)
