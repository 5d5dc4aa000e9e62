"""`prorl tasks oracle`: which Harbor tasks it proves, and what it says of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from needed import usable
from support.commands import prorl
from support.harbor_tasks import make_task
from support.sandboxes import default_image

pytestmark = pytest.mark.timeout(120)
CHECK = "#!/bin/bash\ngrep -q hello /app/hello.txt; echo $((! $?)) > /logs/verifier/reward.txt\n"
SERVED = "#!/bin/bash\n(: < /dev/tcp/$HERE/8000); echo $((! $?)) > /logs/verifier/reward.txt\n"
SERVE = """\
#!/bin/bash
setsid -f python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1
until (: < /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done
"""


def toml(image: str, more: str = "") -> str:
    return f'[environment]\ndocker_image = "{image}"\nworkdir = "/app"\nnetwork_mode = "no-network"\n{more}'


def test_a_missing_image_is_named_with_the_command_that_builds_it(tmp_path: Path) -> None:
    usable("apptainer")
    make_task(tmp_path / "good")
    done = prorl("tasks", "oracle", str(tmp_path), "--images", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "there is no image harbor-" in done.stdout
    assert f"build the missing images first: prorl tasks images {tmp_path} --build" in done.stdout.replace("\n", " ")


@pytest.mark.proof
def test_solution_must_earn_one_and_doing_nothing_zero(tmp_path: Path) -> None:
    usable("apptainer")
    store, image = Path(default_image("apptainer")).parents[2], Path(default_image("apptainer"))
    name = next(link.name for link in store.iterdir() if link.is_symlink() and link.resolve() == image.resolve())
    plain = toml(name)
    make_task(tmp_path / "good", plain, {"tests/test.sh": CHECK})
    make_task(tmp_path / "gift", plain, {"tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"})
    make_task(tmp_path / "broken", plain, {"tests/test.sh": "#!/bin/bash\nexit 1\n"})
    make_task(tmp_path / "wrong", files={"task.toml": 'schema_version = "9.0"\n'})
    variable = toml(name, '[verifier]\nenv = {HERE = "127.0.0.1"}\n')
    make_task(tmp_path / "server", variable, {"tests/test.sh": SERVED, "solution/solve.sh": SERVE})
    done = prorl("tasks", "oracle", str(tmp_path), "--images", str(store), "--jobs", "3")
    assert done.returncode == 1, done.stderr
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    assert rows["good"].split()[3:6:2] == ["1", "0"]
    assert rows["gift"].split()[3:6:2] == ["1", "1"]
    assert "doing nothing earns 1" in rows["gift"]
    assert "wrote neither" in rows["broken"]
    assert "schema_version" in rows["wrong"]
    assert "set live = true in [metadata]" in rows["server"]
    assert "1 of 5 tasks: the solution earns 1, and doing nothing 0" in done.stdout
