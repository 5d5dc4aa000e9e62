"""`prorl doctor`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

STYLES = {"ok": "green", "missing": "bold red", "optional": "yellow"}


def doctor() -> None:
    """Show what this machine has and lacks. Exit code 1 if the default service cannot work here."""
    from ..service.doctor import examine

    table = Table(title="this machine", title_justify="left")
    table.add_column("subject")
    table.add_column("state")
    table.add_column("detail", overflow="fold")
    findings = []
    console = Console()
    with console.status("looking at this machine"):
        for finding in examine():
            findings.append(finding)
            table.add_row(finding.subject, f"[{STYLES[finding.state]}]{finding.state}[/]", finding.detail)
    console.print(table)
    missing = [finding.subject for finding in findings if finding.state == "missing"]
    if missing:
        console.print(f"The default service needs: {', '.join(missing)}.")
        raise typer.Exit(1)
    console.print("The default service can run here. Try: prorl demo")
