"""The code blocks of README.md and docs/, for the tests that run them as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
DOCUMENTS = "\n".join(PAGES.values())
ENGINE_COMMANDS = (
    "prorl-engine --engine http --url http://127.0.0.1:8000",
    "prorl backends list",
    "prorl backends update-weights ./step-1 1",
)
"""Run beside real engines, in this order, by `tests/service/test_real_engines.py`."""
MAKE_SWE_COMMANDS = (
    "prorl tasks make-swe ./my-project --instances 10 --out mine.jsonl",
    "prorl tasks make-swe --recipe swe-mini --out swe-mini.jsonl",
)
"""Run by `tests/make_swe`: the first one whole, the second one for a project of the recipe."""
HARBOR_COMMANDS = (
    "prorl tasks validate tasks/",
    "prorl tasks images tasks/",
    "prorl tasks images tasks/ --build --bases bases.toml",
)
"""Run in this order by `tests/commands/test_task_folders.py`."""
OWN_TASK_COMMANDS = (
    """prorl tasks try my_task.py data.jsonl --say 'bash {"command": "grep -ow be text.txt | wc -l"}' --say \
'finish {"message": "2"}'""",
    "prorl tasks show my_task.py",
    "prorl tasks validate data.jsonl --task-module my_task.py",
    "prorl eval data.jsonl --task-module my_task.py --out counted",
    "prorl tasks try guess_task.py --set seed=4 --say 1 --say 4",
    """prorl tasks try support_task.py --set persona='You lost your key.' --say 'Look on the table.' --say-as \
user='Where is my key?' --say-as user='[STOP]'""",
    """prorl tasks try essay_task.py --set topic=rain --set judge=policy --say 'note {"text": "Rain is water."}' --say \
'Rain is water that falls.' --say 'RATING: 4'""",
)
"""Run by `tests/commands/test_own_tasks.py`."""
ENVIRONMENT_COMMANDS = (
    "prorl env install guess --adapter guess.py:GuessTheNumber",
    """prorl env test guess --args '{"up_to": 3}' --say 3 --say 1""",
    "prorl env list",
    "prorl env remove guess",
)
"""Run by `tests/commands/test_environments.py`, in this order."""
REAL_ENVIRONMENT_COMMANDS = (
    r"""prorl env test gem --args '{"id": "game:GuessTheNumber-v0-easy"}' --seed 1 --say '\boxed{5}'""",
    """prorl env test textarena --args '{"id": "TicTacToe-v0", "players": 2}' --seed 1 --say '[4]' --say '[0]'""",
    """prorl env test reasoning-gym --args '{"name": "basic_arithmetic"}' --seed 1 --say '<answer>-4</answer>'""",
)
"""Run by `tests/stages/environments/test_real_environments.py`."""
ENVIRONMENT_INSTALLS = (
    "prorl env install gem",
    "prorl env install textarena",
    "prorl env install reasoning-gym",
    "prorl env install verifiers",
    "prorl env install verifiers-v0",
)
"""Run by `make environments`."""
SLURM_COMMANDS = (
    "prorl up --slurm cluster.toml --service ~/run-1 --dry-run",
    "prorl up --slurm cluster.toml --service ~/run-1",
    "prorl nodes --service ~/run-1",
    "prorl scale 2 --service ~/run-1",
    "prorl drain n1 --service ~/run-1",
    "prorl down --service ~/run-1",
)
"""Run on a real Slurm, in this order, by `tests/cluster/test_on_slurm.py`."""
CLEAN_COMMANDS = ("prorl clean", "prorl clean --yes", "prorl clean --yes --images --programs --journals")
"""Run by `tests/commands/test_clean.py`, on a machine of its own: elsewhere they would remove what is not theirs."""
DASHBOARD_COMMAND = "prorl dashboard --runs eval"
"""Run by `tests/dashboard`, at a free port."""
DEMO_COMMANDS = ("prorl demo --overlap --steps 40", "prorl demo --overlap --steps 60 --resume")
"""Run by `tests/demo/test_demo.py`, with fewer steps."""


NEMO_GYM_COMMANDS = (
    "export PRORL_NEMO_GYM=counter=http://127.0.0.1:8001",
    """prorl env test nemo-gym --args '{"row": {"responses_create_params": {"input": "Add 3."}, "initial_count": 3, \
"expected_count": 3}}' --say 'The count is 3.'""",
    "prorl tasks validate example.jsonl",
)
OPENENV_COMMANDS = (
    "export PRORL_OPENENV=guess=http://127.0.0.1:8000",
    """prorl env test openenv --args '{"show": "text"}' --seed 3 --say 5 --say 7""",
)
TAU2_COMMANDS = (
    "export TAU2_DATA_DIR=$PWD/tau2-bench/data",
    "prorl env install tau2 --from ./tau2-bench --adapter tau2.py:Tau2",
    """prorl env test tau2 --args '{"domain": "mock", "task": "create_task_1"}' \
--say 'Create a task called Important Meeting for user_1.'""",
)
"""Run by `tests/stages/environments/test_how_to.py`."""


def blocks(language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENTS, re.DOTALL | re.MULTILINE)
