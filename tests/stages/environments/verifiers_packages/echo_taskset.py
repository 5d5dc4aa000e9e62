"""A taskset of verifiers 0.4: say a word."""

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def words(self, task, trace) -> float:
        return float(len((trace.last_reply or "").split()))


class Echo(vf.Taskset[EchoTask]):
    def load(self):
        for word in ("red", "blue"):
            yield EchoTask(EchoData(prompt=f"Say {word}.", answer=word), self.config.task)


__all__ = ["Echo"]
