"""The commands of `prorl`: their modules, and a line of help for each, so that the list needs no import of them."""

from __future__ import annotations

from typing import NamedTuple

ABOUT = (
    "Rollouts of LLM agents for RL training, as a ZeroMQ service. Start with `prorl demo`, then `prorl init`, "
    "`prorl serve` and `prorl submit`."
)
HELP_NAMES = ["-h", "--help"]
"""The options that show the help of every command."""


class Command(NamedTuple):
    place: str
    """A module of this folder, and a function or a group of commands in it."""
    summary: str
    """The beginning of its own help."""
    hidden: bool = False


COMMANDS = {
    "demo": Command("demo:demo", "Train a small policy to use bash, through the whole service"),
    "init": Command("init:init", "Write a commented topology file with every key at its default"),
    "serve": Command("service:serve", "Start and supervise all processes of a service on this node"),
    "services": Command("services:services", "List the services of this account on this machine"),
    "up": Command("cluster:up", "Start a service on the hosts of a Slurm cluster"),
    "nodes": Command("nodes:nodes", "Show the nodes of a service: slots, jobs, last report and state"),
    "scale": Command("cluster:scale", "Change the number of nodes"),
    "drain": Command("cluster:drain", "Drain a node for good"),
    "down": Command("cluster:down", "End a service: its jobs in Slurm, then its brokers"),
    "keep": Command("cluster:keep", "Run the brokers of a service", hidden=True),
    "node": Command("node:node", "Start and supervise the stage processes and engines of one node of a service"),
    "gateway": Command("gateway:gateway", "Serve a service over HTTP: a JSON API"),
    "dashboard": Command("dashboard:dashboard", "Serve a page for the browser"),
    "submit": Command("jobs:submit", "Submit jobs, wait until all have ended, and sum up"),
    "status": Command("status:status", "Show the stage processes, queues, outcomes and backends of a service"),
    "top": Command("top:top", "Watch a service: stages, backends, batches, nodes"),
    "cancel": Command("jobs:cancel", "End jobs with outcome `cancelled`"),
    "job": Command("job:job", "Show what a job went through"),
    "training": Command("training:training", "Show a training over its last steps"),
    "explain": Command("explain:explain", "Find what limited a run, a batch or a job"),
    "eval": Command("evaluate:evaluate", "Evaluate a model on a data file"),
    "regrade": Command("regrade:regrade", "Grade a run again with the current graders"),
    "cheats": Command("regrade:cheats", "List rollouts of a run that may have cheated"),
    "view": Command("view:view", "Look at rollouts: turns, tool calls, rewards, notes"),
    "tasks": Command("tasks:commands", "Check data files, and list and try tasks"),
    "sessions": Command("sessions:commands", "List the sessions of a service, and end one"),
    "backends": Command("backends:commands", "List and change the inference backends"),
    "keys": Command("keys:commands", "Make keys for connections over TCP"),
    "journal": Command("journal:commands", "Show, compact or clear the rollout broker's journal"),
    "image": Command("images:commands", "Build and keep the images that sandboxes start from"),
    "k8s": Command("k8s:commands", "Write manifests of a service on Kubernetes, for `kubectl apply`"),
    "harness": Command("harnesses:commands", "Install and try the agent harnesses that rollouts run"),
    "env": Command("environments:commands", "Install and try environments of other packages"),
    "clean": Command("clean:clean", "List what this account's services and commands left on this machine's disk"),
    "doctor": Command("machine:doctor", "Check what this machine has and what is missing"),
    "broker": Command("broker:commands", "Run one broker alone, for a service on several nodes"),
}
"""In the order of the help."""


def overview() -> str:
    rows = {"--version": "Show the version and exit", "-h, --help": "Show this message and exit"}
    listed = {name: command.summary for name, command in COMMANDS.items() if not command.hidden}
    return "\n".join(
        (
            "Usage: prorl [OPTIONS] COMMAND [ARGS]...\n",
            *_wrapped(ABOUT),
            *("\nOptions:", *_table(rows), "\nCommands (`prorl COMMAND --help` says more):", *_table(listed)),
        )
    )


def _wrapped(text: str, width: int = 78) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}"
    return [f" {line}" for line in lines]


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {name:{width}}  {text}" for name, text in rows.items()]
