"""Write .ci/turn.toml for the next submission (`make turn`); see tests/support/proofs.py.

usage: raise_turn.py LANDED      LANDED is the commit that landed last
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.proofs import TURN_FILE, BadTurn, Turn, raised


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=TURN_FILE.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadTurn(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def turn_at(commit: str) -> Turn:
    """Return the turn of a commit; the first one where it has no such file."""
    known = git("ls-tree", "--name-only", "--full-tree", commit, ".ci/turn.toml")
    return Turn.parse(git("show", f"{commit}:.ci/turn.toml")) if known else Turn()


def write(landed: str) -> str:
    """Write the file, and return a line for the user. Keep what the submission lists in `again`."""
    try:
        since = git("rev-parse", "--verify", f"{landed}^{{commit}}")
    except BadTurn as error:
        raise BadTurn(f"no commit {landed!r}: name the one that landed last, make turn LANDED=COMMIT") from error
    head = git("rev-parse", "HEAD")
    if since == head:
        raise BadTurn(
            f"{landed} is HEAD, so nothing is to be submitted; name the commit that landed last: LANDED=COMMIT"
        )
    git("merge-base", "--is-ancestor", since, head)
    old = Turn.read() if TURN_FILE.is_file() else Turn()
    turn = raised(turn_at(since), since, head, old.again if old.since == since else ())
    TURN_FILE.write_text(turn.text(), encoding="utf-8")
    return f"turn {turn.number}, quarter {turn.quarter}, since {since[:12]}: commit .ci/turn.toml as the last change"


def main(arguments: list[str]) -> None:
    try:
        if len(arguments) != 1:
            raise BadTurn("name the commit that landed last")
        print(write(*arguments))
    except BadTurn as error:
        sys.exit(f"raise_turn: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
