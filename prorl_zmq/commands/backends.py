"""`prorl backends`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from ..client.blocking.client import RolloutClient
from ..wire.messages.backends import Backend, ListBackends
from ..wire.messages.base import new_id
from ..wire.messages.chat import ChatSettings
from ..wire.messages.engines import UPDATE_LIMIT_S, UpdateMode
from . import options
from .backend_tables import adapter_tables, backend_table, copy_table, detail_tables
from .option_groups import Frozen, ModelNameOption, OptionGroup
from .progress_display import Progress
from .tables import print_json, show, size_text
from .target import Target

if TYPE_CHECKING:
    from ..wire.messages.backends import BackendList

commands = typer.Typer(
    help="List and change the inference backends: the engines that jobs are spread over. Engine hosts (`prorl-engine`) "
    "register themselves; these commands apply to them too.",
    rich_markup_mode=None,
)

DEFAULTS = Backend(backend_id="any", endpoint="")

BackendId = Annotated[str, typer.Argument(metavar="BACKEND", help="The backend's id, as `prorl backends list` shows.")]
Version = Annotated[int, typer.Argument(min=0, metavar="VERSION", help="The version of the weights, as you count.")]
Mode = Annotated[
    UpdateMode,
    typer.Option(
        help="What happens to running generations: `keep` pauses them and continues with the new weights, `drain` lets "
        "them end with the old ones first, `abort` ends them, and the new weights generate the rest of their turn."
    ),
]
EnginesTimeout = Annotated[
    float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="How long the engines may take.")
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Update although a live trainer publishes the model's weights.")
]
OfModel = Annotated[str, typer.Option(metavar="NAME", help="The model, by the name by which jobs select it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions(OptionGroup):
    """Of each step of an update."""

    timeout_s: EnginesTimeout = 600.0
    take_over: TakeOver = False
    model_name: OfModel = DEFAULTS.name

    @property
    def arguments(self) -> dict[str, Any]:
        """What the client's methods take."""
        return {"timeout_s": self.timeout_s, "take_over": self.take_over, "model": self.model_name}


@commands.command("list")
def list_(
    target: Target,
    details: Annotated[
        bool,
        typer.Option("--details", "-d", help="Show weight, limit, context, model, endpoint, host and KV cache too."),
    ] = False,
    watch: options.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """List the backends: state, weight version, jobs in flight, tokens/s and cache hits.

    States: `ready`; `draining`: it keeps its jobs and gets no more; `updating`: it gets no jobs until it serves the new
    weights (while hosts only fetch them, it is `ready`, and a line below the table says so); `behind`: it serves other
    weights than were announced last, gets no jobs, and below the table is what to do; `probation`: a job could not
    reach it, or its generation failed there, and single jobs try it, at growing intervals, until one is served;
    `unwell`: its host says why it cannot serve; `starting`: its engine loads, and jobs wait for it; `failed`: its
    engine could not be started, and the reason is below the table. Cache hits are the share of prompt tokens that the
    engine found in its prefix cache. Engine hosts report them and tokens/s with their heartbeats; some servers do not
    say.
    """
    with target.client() as client:
        if as_json:
            listed = backend_list(client)
            print_json({"backends": listed.backends, "starts": listed.starts, "adapters": listed.adapters})
        else:
            show(lambda: backend_list(client), lambda listed: _tables(listed, details=details), watch=watch)


@commands.command()
def add(
    target: Target,
    backend_id: Annotated[str, typer.Argument(metavar="BACKEND", help="A name for it: letters, digits, `._:-`.")],
    endpoint: Annotated[str, typer.Argument(help="Endpoint of its engine host, ipc://PATH or tcp://HOST:PORT.")],
    weight: Annotated[
        float, typer.Option(min=0.0, help="Relative load: a backend of weight 2 gets twice the jobs.")
    ] = DEFAULTS.weight,
    node: Annotated[str, typer.Option(help="Its node: jobs that run on the same node prefer it.")] = DEFAULTS.node,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Most jobs at once.")] = DEFAULTS.max_in_flight,
    context_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of a prompt and its answer; 0: unknown.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Tokenizer and chat template, as stages see them. [default: the package's]"),
    ] = None,
    model: Annotated[str, typer.Option(help="The name of its model, for people.")] = "",
    model_name: ModelNameOption = DEFAULTS.name,
    frozen: Frozen = False,
    weight_version: Annotated[int, typer.Option(min=0, help="The version of the weights that it serves.")] = 0,
    curve_key: Annotated[str, typer.Option(metavar="KEY", help="Its public key; empty: it takes plaintext.")] = "",
) -> None:
    """Register an engine host that does not register itself, or make a draining one ready again.

    An HTTP server (vLLM, SGLang) is not a backend: `prorl-engine --engine http --url URL` serves and registers it.
    """
    chat = ChatSettings() if tokenizer is None else ChatSettings(kind="transformers", tokenizer=tokenizer)
    backend = Backend(
        backend_id=backend_id,
        endpoint=endpoint,
        model=model,
        name=model_name,
        frozen=frozen,
        chat=chat,
        weight_version=weight_version,
        node=node,
        weight=weight,
        max_in_flight=max_in_flight,
        context_tokens=context_tokens,
        curve_key=curve_key,
    )
    with target.client() as client:
        client.backends.add(backend)


@commands.command()
def drain(target: Target, backend_id: BackendId) -> None:
    """Assign no more jobs to a backend; those that hold it keep it."""
    with target.client() as client:
        client.backends.drain(backend_id)


@commands.command()
def remove(target: Target, backend_id: BackendId) -> None:
    """Forget a backend and the assignments on it."""
    with target.client() as client:
        client.backends.remove(backend_id)


@commands.command()
def clear(target: Target) -> None:
    """Forget all backends."""
    with target.client() as client:
        client.backends.clear()


@commands.command("set-version")
def set_version(
    target: Target, weight_version: Version, take_over: TakeOver = False, model_name: OfModel = DEFAULTS.name
) -> None:
    """Record that all backends of a model serve these weights from now on; the engines themselves do not change.

    For engines that are updated by other means than `prorl backends update-weights`.
    """
    with target.client() as client:
        client.set_weight_version(weight_version, take_over=take_over, model=model_name)
        print(f"what {_served(client, model_name)} generate from now on is of version {weight_version}")


@commands.command("update-weights")
def update_weights(
    target: Target,
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The weights, as the engine hosts see them.")],
    weight_version: Version,
    update: UpdateOptions,
    mode: Mode = "keep",
    base: Annotated[str, typer.Option(metavar="NAME", help="The model that a new adapter adapts.")] = "",
) -> None:
    """Load the weights at DIR into every backend of a model. An engine that rejects them keeps its weights.

    A model that is no backend's own is a LoRA adapter: it goes to the backends with adapter slots.
    """
    with target.client() as client:
        started = time.monotonic()
        with Progress("prorl backends", f"loading version {weight_version} from {path}"):
            engines = client.update_weights(path, weight_version, mode=mode, base=base, **update.arguments)
        spent_s = time.monotonic() - started
        name = update.model_name
        is_adapter = any(name in one.backend.adapters for one in client.backends.list())
        of = f"the adapter {name}" if is_adapter else name
        print(f"{_served(client, name)} serve version {weight_version} of {of} after {spent_s:.1f} s")
        for backend_id, times in engines.items():
            read = f"read {size_text(times.read_bytes)} in {times.fetch_s:.1f} s while it generated"
            own = f"{read}, and paused for {times.pause_s:.2f} s"
            print(f"{backend_id} {f'loaded it in {times.load_s:.2f} s while it generated' if is_adapter else own}")


@commands.command()
def weights(target: Target, watch: options.Watch = False, as_json: options.AsJson = False) -> None:
    """Show the copies of weights on the engine hosts: version, bytes on disk, and who gave the last version.

    Hosts with the same copy share a machine and a folder. `fetched` and `seconds` are of the last version that a host
    got from other processes; from a folder that it sees, it fetches nothing.
    """
    with target.client() as client:
        if as_json:
            print_json({"copies": {one.backend.backend_id: one.copy for one in client.backends.list() if one.copy}})
        else:
            show(client.backends.list, copy_table, watch=watch)


@commands.command("begin-weights")
def begin_weights(
    target: Target,
    weight_version: Version,
    update: UpdateOptions,
    mode: Mode = "keep",
    limit_s: Annotated[
        float,
        typer.Option(
            "--limit", min=0.001, metavar="SECONDS", help="Engines continue after this time without `end-weights`."
        ),
    ] = UPDATE_LIMIT_S,
) -> None:
    """Pause all generation of a model while another program moves new weights into the engines.

    Jobs that need a backend wait. `end-weights` lets the engines continue with the new weights, `cancel-weights`
    with the old ones.
    """
    with target.client() as client:
        with Progress("prorl backends", "waiting until the engines generate nothing"):
            client.begin_weights(weight_version, mode, update_limit_s=limit_s, **update.arguments)
        print(f"nothing is generated; end or cancel version {weight_version} within {limit_s:g} s")


@commands.command("end-weights")
def end_weights(target: Target, weight_version: Version, update: UpdateOptions) -> None:
    """Resume generation with the weights that `begin-weights` named."""
    with target.client() as client:
        client.end_weights(weight_version, **update.arguments)
        print(f"{_served(client, update.model_name, weight_version)} serve version {weight_version}")


@commands.command("cancel-weights")
def cancel_weights(target: Target, weight_version: Version, update: UpdateOptions) -> None:
    """Resume generation with the old weights: those that `begin-weights` named will not come."""
    with target.client() as client:
        client.cancel_weights(weight_version, **update.arguments)
        print(f"{_served(client, update.model_name)} continue without version {weight_version}")


@commands.command("remove-model")
def remove_model(
    target: Target,
    model_name: Annotated[str, typer.Argument(metavar="NAME", help="The model of a LoRA adapter.")],
    timeout_s: EnginesTimeout = 600.0,
    take_over: TakeOver = False,
) -> None:
    """Unload an adapter from all engines; its jobs are refused from then on."""
    with target.client() as client:
        client.remove_model(model_name, timeout_s=timeout_s, take_over=take_over)
        print(f"the model {model_name} is removed")


def backend_list(client: RolloutClient) -> BackendList:
    """Return the backends of a service, and its engines that are not backends yet."""
    listed: BackendList = client.backends.ask(ListBackends(new_id()))
    return listed


def _served(client: RolloutClient, model: str, version: int | None = None) -> str:
    """Return how many backends take a model's weights, or have this version of them."""
    backends = [one.backend for one in client.backends.list()]
    taking = [one.weight_version for one in backends if one.name == model and not one.frozen]
    taking += [one.adapters[model][-1] for one in backends if model in one.adapters]
    return f"{sum(version in (None, one) for one in taking)} backend(s)"


def _tables(listed: BackendList, *, details: bool) -> Group:
    tables = Group(backend_table(listed.backends, listed.starts), *adapter_tables(listed))
    if details:
        return Group(tables, detail_tables(listed.backends))
    return Group(
        tables, "with weight, limit, context, model, endpoint, memory and version: prorl backends list --details"
    )
