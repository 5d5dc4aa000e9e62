"""The programs `prorl`, `prorl-stage` and `prorl-engine`, and how their errors look: one clear line, and an exit code.

Exit codes: 0 done; 1 the service could not do it; 2 a wrong flag, file or setting; 3 an engine could not start; 130
interrupted.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Annotated

import typer

from .. import errors
from ..system.logs import say, start_logging
from . import (
    backends,
    cluster,
    dashboard,
    demo,
    engine,
    evaluate,
    explain,
    gateway,
    harnesses,
    images,
    init,
    job,
    jobs,
    journal,
    k8s,
    keys,
    machine,
    node,
    nodes,
    service,
    stage,
    tasks,
    top,
    view,
)

FAILED, USAGE_ERROR, CANNOT_START, INTERRUPTED = 1, 2, 3, 130
CALLERS_FAULT = (
    errors.ConfigError,
    errors.DuplicateBackend,
    errors.DuplicateJob,
    errors.EndpointInUse,
    errors.InvalidEndpoint,
    errors.InvalidJob,
    errors.InvalidRecord,
    errors.InvalidWeights,
    errors.JobTooLarge,
    errors.MalformedMessage,
    errors.NotAllowed,
    errors.SandboxUnavailable,
    errors.UnknownBackend,
    errors.UnknownJob,
    errors.UnknownTask,
)


def new_typer(help_text: str) -> typer.Typer:
    """Begin a program; `run_program` runs it."""
    return typer.Typer(
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


prorl = new_typer(
    "Rollouts of LLM agents for RL training, as a ZeroMQ service. Start with `prorl demo`, then `prorl init`, "
    "`prorl serve` and `prorl submit`."
)
prorl.command("demo")(demo.demo)
prorl.command("init")(init.init)
prorl.command("serve")(service.serve)
prorl.command("up")(cluster.up)
prorl.command("nodes")(nodes.nodes)
prorl.command("scale")(cluster.scale)
prorl.command("drain")(cluster.drain)
prorl.command("down")(cluster.down)
prorl.command("keep", hidden=True)(cluster.keep)
prorl.command("node")(node.node)
prorl.command("gateway")(gateway.gateway)
prorl.command("dashboard")(dashboard.dashboard)
prorl.command("submit")(jobs.submit)
prorl.command("status")(jobs.status)
prorl.command("top")(top.top)
prorl.command("cancel")(jobs.cancel)
prorl.command("job")(job.job)
prorl.command("explain")(explain.explain)
prorl.command("eval")(evaluate.evaluate)
prorl.command("view")(view.view)
prorl.add_typer(tasks.commands, name="tasks")
prorl.add_typer(backends.commands, name="backends")
prorl.add_typer(keys.commands, name="keys")
prorl.add_typer(journal.commands, name="journal")
prorl.add_typer(images.commands, name="image")
prorl.add_typer(k8s.commands, name="k8s")
prorl.add_typer(harnesses.commands, name="harness")
prorl.command("doctor")(machine.doctor)
prorl.add_typer(service.broker, name="broker")

prorl_stage = new_typer("A stage process.")
prorl_stage.command("prorl-stage")(stage.stage)

prorl_engine = new_typer("An engine host.")
prorl_engine.command("prorl-engine")(engine.engine)


@prorl.callback(invoke_without_command=True)
def _version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show:
        print(f"prorl-zmq {version('prorl-zmq')}")
        raise typer.Exit


DEFAULT_ARGUMENTS = {"prorl": ["--help"], "prorl-stage": [], "prorl-engine": []}
"""What a program does without arguments."""
PROGRAMS = {"prorl": prorl, "prorl-stage": prorl_stage, "prorl-engine": prorl_engine}


def run(program: str, arguments: list[str]) -> int:
    """Run one of the programs with its arguments; return its exit code."""
    return run_program(program, PROGRAMS[program], arguments or DEFAULT_ARGUMENTS[program])


def run_program(program: str, app: typer.Typer, arguments: list[str]) -> int:
    """Run a program under a name, its errors as a line and an exit code."""
    start_logging(program)
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else program
        return _complain(path, f"{_usage_message(error)} (see `{path} --help`)", USAGE_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except errors.ProrlError as error:
        code = CANNOT_START if error.fields.get("starting") else FAILED
        return _complain(program, error.message, USAGE_ERROR if isinstance(error, CALLERS_FAULT) else code)
    return int(code or 0)


def _usage_message(error: typer.TyperException) -> str:
    format_message = getattr(error, "format_message", error.__str__)
    return str(format_message()).replace("Value error, ", "").rstrip(".")


def _complain(program: str, message: str, code: int) -> int:
    say(program, message, logging.ERROR)
    return code
