"""For tests of tasks, harness adapters and training loops: a whole service in the test's process.

with LocalService(handlers={"riddle": RiddleHandler}, engine=say("4")) as service, service.client() as client:
client.submit(Job(task="riddle", instance={"question": "2 + 2", "answer": "4"}))
(trajectory,) = client.collect(1)
"""

from .broker_threads import BrokerThreads
from .local_service import LocalService
from .scripted_engine import ScriptedEngine, say, tool_call

__all__ = ["BrokerThreads", "LocalService", "ScriptedEngine", "say", "tool_call"]
