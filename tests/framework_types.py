"""The base classes of OpenRLHF and AReaL, whose packages need GPUs: each has one method, which an adapter overrides."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

BASES = {"openrlhf.utils.agent": "AgentExecutorBase", "areal.api.workflow_api": "RolloutWorkflow"}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, base in BASES.items():
        module = ModuleType(name)
        setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
