"""What Harbor's verifier reads from folders of reward files, for bench/harbor.py: `python -P harbor_peer.py FOLDER`.

The Python is that of `make harbor`. Each folder in FOLDER has a folder `verifier`, as /logs/verifier was. Prints a
JSON object: by the folder's name the rewards, or null where Harbor raises an error. Its environment is replaced by one
whose commands do nothing: the files are there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harbor.models.task.config import TaskOS
from harbor.models.trial.paths import TrialPaths
from harbor.verifier.verifier import Verifier


class NoEnvironment:
    os = TaskOS.LINUX

    async def exec(self, **_: Any) -> Any:
        return SimpleNamespace(return_code=0, stdout="", stderr="")

    def is_path_mounted(self, *_: Any) -> bool:
        return True


async def rewards_of(folder: Path) -> dict[str, float] | None:
    paths = SimpleNamespace(tests_dir=Path("/tests"), test_path_for=lambda _: Path("/tests/test.sh"))
    task: Any = SimpleNamespace(paths=paths, config=SimpleNamespace(verifier=SimpleNamespace(env={})))
    environment: Any = NoEnvironment()
    try:
        result = await Verifier(task, TrialPaths(folder), environment, skip_tests_upload=True).verify()
    except Exception as error:  # noqa: BLE001 - of many kinds, also of pydantic
        print(f"{folder.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return result.rewards


async def main(folders: list[Path]) -> None:
    print(json.dumps({folder.name: await rewards_of(folder) for folder in folders}))


if __name__ == "__main__":
    asyncio.run(main(sorted(Path(sys.argv[1]).iterdir())))
