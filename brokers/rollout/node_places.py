"""`NodePlaces`: the machine and run folder of each node name. Pure.

Two machines under one name would get each other's sandboxes. A second place under a name waits: it is refused once the
first one reports again, and accepted once the first one's lease expires. A process that reports no place is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.messages.stages import StageReport


class NodePlaces:
    def __init__(self) -> None:
        self._members: dict[str, dict[str, str]] = {}
        """Members and their places, by node."""
        self._nodes: dict[str, str] = {}
        """The node of each member."""
        self._waiting: dict[str, float] = {}
        """Since when members wait for a name."""

    def joins(self, report: StageReport, heard_at: Callable[[str], float | None], now: float) -> bool:
        """Accept a node's member; return False if it must report again.

        Args:
            report: the member's report.
            heard_at: returns when a member was last heard; None if it is gone.
            now: the time.

        Raises:
            ConfigError: another live machine or run folder has the name.
        """
        member, there = report.from_member, self._members.get(report.node, {})
        if not report.place or member in there:
            return True
        others = {one: place for one, place in there.items() if place != report.place and heard_at(one) is not None}
        if not others:
            self._members.setdefault(report.node, {})[member] = report.place
            self._nodes[member] = report.node
            self._waiting.pop(member, None)
            return True
        since = self._waiting.setdefault(member, now)
        for one, place in others.items():
            if (heard_at(one) or 0.0) > since:
                raise ConfigError(
                    f"the name {report.node} is that of {place}, and cannot be that of {report.place} too: jobs "
                    "continue where their sandboxes are; name each node and run folder differently (--node, or --name "
                    "of `prorl node`)",
                    key="node",
                )
        return False

    def left(self, member: str) -> None:
        """Remove a member that is gone."""
        self._waiting.pop(member, None)
        node = self._nodes.pop(member, None)
        if node is not None:
            del self._members[node][member]
            if not self._members[node]:
                del self._members[node]
