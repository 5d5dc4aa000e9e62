"""`prorl doctor`."""

from __future__ import annotations

import typer
from rich.table import Column, Table
from rich.text import Text

from .options import console

STYLES = {"ok": "green", "missing": "bold red", "optional": "yellow"}


def doctor() -> None:
    """Show what this machine has and lacks. Exit code 1 if the default service cannot work here."""
    from ..service.doctor import examine

    detail = Column("detail", overflow="fold")
    table = Table("subject", "state", detail, title="this machine", title_justify="left")
    findings = []
    screen = console()
    with screen.status("looking at this machine"):
        for finding in examine():
            findings.append(finding)
            table.add_row(finding.subject, Text(finding.state, STYLES[finding.state]), Text(finding.detail))
    screen.print(table)
    missing = [finding.subject for finding in findings if finding.state == "missing"]
    if missing:
        screen.print(f"The default service needs: {', '.join(missing)}.")
        raise typer.Exit(1)
    screen.print("The default service can run here. Try: prorl demo")
