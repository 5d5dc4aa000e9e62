"""The repository of a `swe` job in its sandbox: reset to its base, its patch extracted, a patch applied.

All operations are git commands, run by bash in the sandbox. The repository keeps only the history of its base, in EVAL
too: no other branch, later commit, remote, reflog, or object of these; where a bug was inserted, no history at all.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from ...errors import HandlerFailed

if TYPE_CHECKING:
    from ...tasks.swe import SweInstance
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox

GIT_S = 600.0
"""Longest git command in seconds; the limits of the phases end before."""
PATCH_LIMIT_BYTES = 1 << 20
"""Largest patch of an agent: it crosses the wire from RUN to EVAL as text of its bytes, where bytes above 127 take
two."""
NEW_FILE_BYTES = 100_000
"""Largest new file that is kept in a patch that would otherwise be too large."""
CACHES = (
    *("node_modules", "__pycache__", "site-packages", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
    *(".tox", ".nox", ".eggs", ".cache", ".gradle", ".npm", ".ipynb_checkpoints"),
)
"""Folders of programs and caches: new files in them are not part of a patch."""
SHOWN = 2000
NOTHING = ":(glob)!nothing!"
"""A pathspec that matches no file: without one, all files would match."""
GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
"""Hides who runs git, and when: the same base becomes the same commit."""
OPTIONS = {
    "safe.directory": "*",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.fileMode": "true",
    "core.autocrlf": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "gc.auto": "0",
    "commit.gpgSign": "false",
}
PRELUDE = f"""\
set -euo pipefail
HOME=$(mktemp -d)
trap 'rm -rf "$HOME"' EXIT
printf '[safe]\\n\\tdirectory = *\\n' > "$HOME/.gitconfig"
export HOME GIT_CONFIG_GLOBAL=$HOME/.gitconfig
git() {{ command git {" ".join(f"-c {name}={shlex.quote(value)}" for name, value in OPTIONS.items())} "$@"; }}
cd "$DIRECTORY"
"""
"""Git before 2.38 reads `safe.directory` from a file only."""
BASE = """\
test -e .git || { git init -q . && git add -A && git commit -qm base; }
if [ -n "$BASE_COMMIT" ]; then
  base=$(git rev-parse --verify -q "$BASE_COMMIT^{commit}") || { echo "there is no commit $BASE_COMMIT" >&2; exit 1; }
  if [ "$(git log -1 --format='%P %ae')" != "$base setup@swebench.config" ] && [ "$(git rev-parse HEAD)" != "$base" ]
  then git checkout -qf "$base"; fi
fi
git diff --quiet --ignore-submodules=dirty HEAD || git commit -q --allow-empty -am set-up
find . -name __pycache__ -prune -exec rm -rf {} +
"""
"""The images of SWE-bench have their own commit on top of the base, with the changes of their set-up; images for other
languages than Python, and of other sets, have such changes uncommitted. Compiled modules may be of a later state."""
SETUP = """\
git apply --whitespace=nowarn -
git add -A
commit=$(git commit-tree "$(git write-tree)" -m base)
"""
"""A commit without parents: the history before the bug is the answer."""
CUT = """\
cut_off() {
  comm -23 <(git for-each-ref --format='%(refname)' | LC_ALL=C sort) \\
    <(git for-each-ref --format='%(refname)' --merged "$1" refs/tags | LC_ALL=C sort) \\
    | sed 's/^/delete /' | git update-ref --no-deref --stdin
  git update-ref refs/heads/base "$1"
  git symbolic-ref HEAD refs/heads/base
  git remote | while read -r name; do git remote remove "$name"; done
  git worktree prune
  rm -rf "$2"/logs "$2"/{ORIG,FETCH,MERGE,CHERRY_PICK,REVERT,BISECT}_HEAD "$2"/rebase-merge "$2"/rebase-apply \\
    "$2"/{COMMIT_EDITMSG,MERGE_MSG,SQUASH_MSG,AUTO_MERGE} "$2"/objects/pack/*.{keep,promisor}
  git config --unset-all extensions.partialClone || true
  git repack -qad
  rm -f "$2"/objects/info/alternates
  git prune --expire=now
  git prune-packed -q
}
git checkout -q --detach "$commit" 2>/dev/null || git update-ref --no-deref HEAD "$commit"
dir=$(git rev-parse --git-dir)
cut_off "$commit" "$dir"
if [ -d "$dir/modules" ]; then
  find "$dir/modules" -name objects -prune | while read -r objects; do
    module=${objects%/objects}
    at=$(GIT_DIR=$module git rev-parse --verify -q HEAD) || { rm -rf "$module"; continue; }
    (export GIT_DIR=$module; git update-ref --no-deref HEAD "$at"; cut_off "$at" "$module")
  done
fi
git ls-files -oz --exclude-standard | tr '\\n\\0' '\\1\\n' | sed 's/[][*?\\\\]/\\\\&/g; s/^/\\//; s/ $/\\\\ /' \\
  | tr '\\1' '?' > "$HOME/untracked"
mkdir -p "$dir/info"
cat "$HOME/untracked" >> "$dir/info/exclude"
echo "$commit"
"""
"""Keeps tags that lead to the base, from which projects derive their version. Submodules are repositories of their own.
Other files of the image, such as built programs, are not part of a patch: EVAL has them too."""
TAKE = """\
export GIT_INDEX_FILE=/tmp/.index-of-the-patch
rm -f "$GIT_INDEX_FILE"
git read-tree "$BASE_COMMIT"
git add -A -- .
new() { git diff --cached --no-renames --diff-filter=A -z "$@"; }
leave_out() {
  LC_ALL=C sort -zu > /tmp/left-out
  git update-index -z --force-remove --stdin < /tmp/left-out
  tr '\\0' '\\n' < /tmp/left-out | { head -c 2000; cat > /dev/null; } >&2
}
{
  new --name-only "$BASE_COMMIT" | grep -zE {caches} || true
  new --name-only "$BASE_COMMIT" | { grep -zE '/pyvenv\\.cfg$' || true; } | while read -rd '' name; do
    new --name-only "$BASE_COMMIT" -- ":(literal)${name%/pyvenv.cfg}"
  done
} | leave_out
if [ -n "$SMALL" ]; then
  new --numstat "$BASE_COMMIT" | { grep -zE '^-[[:space:]]-[[:space:]]' || true; } | cut -zf3- > /tmp/large
  new --name-only "$BASE_COMMIT" | while read -rd '' name; do
    test "$(git cat-file -s ":$name")" -le "$NEW_FILE_BYTES" || printf '%s\\0' "$name"
  done >> /tmp/large
  leave_out < /tmp/large
fi
git diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ "$BASE_COMMIT" \\
  -- . {exclude}
"""
KEEP = """\
find . -mindepth 2 -name .git -prune -print0 | LC_ALL=C sort -z > /tmp/nested.list
cp -a --no-preserve=ownership .git /tmp/base.git
git ls-files -coz -- {files} > /tmp/tests.list
tar --null --ignore-failed-read -cf /tmp/tests.tar -T /tmp/tests.list
"""
"""Saves what a patch must not change: the repository's own folder, which `patch` would write to, and the tests. A
repository within the repository would hide files from git."""
APPLY = """\
cat > /tmp/patch.diff
applied=yes
git apply --whitespace=nowarn --verbose /tmp/patch.diff \\
  || git apply --whitespace=nowarn --verbose --reject /tmp/patch.diff \\
  || patch --batch --forward --fuzz=5 -p1 -i /tmp/patch.diff || applied=no
"""
"""The three ways that swebench tries; but no way reverts a patch that is partly there."""
RESTORE = """\
find . -mindepth 2 -name .git -prune -print0 | LC_ALL=C sort -z | LC_ALL=C comm -z -13 /tmp/nested.list - \\
  | xargs -0 -r rm -rf --
rm -rf .git
mv /tmp/base.git .git
git ls-files -coz -- {files} | xargs -0 -r rm -rf --
tar --no-same-owner -xf /tmp/tests.tar
rm -f /tmp/patch.diff /tmp/tests.list /tmp/tests.tar /tmp/nested.list
"""
"""Avoids git's checkout, which would apply a patch's attributes and filters."""


class TakenPatch(NamedTuple):
    text: str = ""
    """Each character is a byte."""
    problem: str = ""
    """Why there is no patch."""
    left_out: str = ""
    """Names of new files that are not part of it."""


async def prepare(sandbox: Sandbox, instance: SweInstance) -> str:
    """Reset the repository to the instance's base, without later history; return the base's commit."""
    steps = [BASE, SETUP if instance.setup_patch else "commit=$(git rev-parse HEAD)\n"]
    hidden = [each if each.startswith("/") else f"{instance.directory}/{each}" for each in instance.hidden]
    if hidden:
        steps.append(f"rm -rf -- {' '.join(map(shlex.quote, hidden))}\n")
    steps.append(CUT)
    done = await _bash(
        sandbox, "".join(steps), instance, instance.setup_patch.encode(), BASE_COMMIT=instance.base_commit
    )
    if done.exit_code:
        raise HandlerFailed(
            f"the repository {instance.directory} of the image {instance.image} cannot be reset to its base: "
            f"{_words(done)}",
            exception="git",
        )
    return done.stdout.decode().split()[-1]


async def take_patch(sandbox: Sandbox, instance: SweInstance, base_commit: str) -> TakenPatch:
    """Return all changes of the agent since the base, as one patch.

    It includes new files, binary files and modes, but no files that git ignores, no `test_files`, and no new files of
    caches and virtual environments. A patch that would be too large omits its new files that are binary or large. The
    agent's processes are ended first.
    """
    await sandbox.end_processes()
    exclude = " ".join(shlex.quote(_excluded(each)) for each in instance.test_files)
    names = "|".join(each.replace(".", "\\.") for each in CACHES)
    script = TAKE.replace("{exclude}", exclude).replace("{caches}", shlex.quote(f"(^|/)({names})/|\\.py[co]$"))
    for small in ("", "yes"):
        done = await _bash(
            sandbox,
            script,
            instance,
            output_limit_bytes=PATCH_LIMIT_BYTES + 1,
            BASE_COMMIT=base_commit,
            SMALL=small,
            NEW_FILE_BYTES=str(NEW_FILE_BYTES),
        )
        left_out = done.stderr.decode(errors="replace").strip()
        if done.exit_code:
            return TakenPatch(problem=f"the agent left a repository that git takes no patch from: {_words(done)}")
        text = done.stdout.decode("latin-1")
        if not done.dropped_bytes and len(text.encode()) <= PATCH_LIMIT_BYTES:
            return TakenPatch(text, left_out=left_out)
    return TakenPatch(problem=f"the patch is larger than {PATCH_LIMIT_BYTES} bytes", left_out=left_out)


async def apply_patch(sandbox: Sandbox, instance: SweInstance, patch: bytes, timeout_s: float) -> str:
    """Apply an agent's patch as swebench does, and undo its changes to `test_files`; return why it does not apply.

    A patch that takes longer than `timeout_s` does not apply: a patch can make git search for hours.
    """
    files = " ".join(map(shlex.quote, instance.test_files or [NOTHING]))
    script = f'{KEEP.format(files=files)}{APPLY}{RESTORE.format(files=files)}[ "$applied" = yes ]\n'
    done = await _bash(sandbox, script, instance, patch, timeout_s=timeout_s)
    return _words(done, timeout_s) if done.exit_code or done.timed_out else ""


async def _bash(
    sandbox: Sandbox,
    script: str,
    instance: SweInstance,
    stdin: bytes = b"",
    output_limit_bytes: int = 64 * 1024,
    timeout_s: float = GIT_S,
    **environment: str,
) -> ExecResult:
    return await sandbox.exec(
        ["/bin/bash", "--noprofile", "--norc", "-c", f"{PRELUDE}\n{script}"],
        timeout_s=timeout_s,
        stdin=stdin,
        output_limit_bytes=output_limit_bytes,
        environment={**GIT_ENVIRONMENT, "DIRECTORY": instance.directory, **environment},
        directory="/",
    )


def _excluded(pathspec: str) -> str:
    """Return the excluding form of a pathspec."""
    if not pathspec.startswith(":("):
        return f":(exclude){pathspec}"
    magic, _, rest = pathspec.removeprefix(":(").partition(")")
    return f":({magic},exclude){rest}"


def _words(done: ExecResult, limit_s: float = GIT_S) -> str:
    if done.timed_out:
        return f"it took longer than {limit_s:g} s"
    said = (done.stderr or done.stdout).decode(errors="replace").strip()
    return said[-SHOWN:] or f"exit code {done.exit_code}"
