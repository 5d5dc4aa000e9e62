"""The adapter of tau2 over the stand-in of its package, for a worker's interpreter."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests"))
from tau2_contract import modules  # noqa: E402 - of the tests, which a worker does not find

sys.modules.update(modules())
Tau2 = runpy.run_path(str(ROOT / "stages/environments/adapters/tau2.py"))["Tau2"]
