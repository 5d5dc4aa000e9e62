"""A taskset of verifiers 0.4, and an environment of verifiers 0.1, with the adapters that play them.

The file is an adapter's: `Verifiers` and `VerifiersV0` are those of the package, once this folder can be imported from.
"""

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "verifiers_packages"))
ADAPTERS = Path(__file__).parents[3] / "stages" / "environments" / "adapters"


def __getattr__(name: str):
    file = {"Verifiers": "verifiers.py", "VerifiersV0": "verifiers_v0.py"}[name]
    return runpy.run_path(str(ADAPTERS / file), run_name=file)[name]
