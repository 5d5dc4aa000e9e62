"""The service's keys of verl's configuration, read from its `DictConfig`; errors name an invalid one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...errors import ConfigError
from ...wire.messages.base import POLICY, ModelName
from ...wire.messages.jobs import EpisodeLimits
from ..dataset_rows import job_maker
from ..session import TooLong, load_function

if TYPE_CHECKING:
    from ..dataset_rows import JobMaker

TESTED = "0.9"
NAME = "prorl"
SERVICE_KEYS = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}"
ROLLOUT_KEYS = f"trainer.v1.{NAME}"
BATCH = frozenset({"weight", "max_staleness", "max_replacements", "stop_early", "lease_s"})
SAMPLED = BATCH | {"carry", "max_given_up"}

Options = TypeVar("Options", bound=msgspec.Struct)


class ServiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.prorl`: the service, and the engines' weights."""

    endpoint: str | None = None
    """The front door; None: that of `prorl serve` without a topology file, on this node."""
    keys: str | None = None
    """The folder of keys, if the service requires them."""
    served: str = ""
    """Folder of the model that the engines were started with, such as `${actor_rollout_ref.model.path}`."""
    folder: str = ""
    """Where each step's weights are written, under the same path on all engine hosts."""
    form: Literal["full", "delta"] = "full"
    """What is written: all weights, or what changed since the last step; see `WeightsPublisher`."""
    keep: int = 2
    """How many folders of full weights are kept."""
    mode: Literal["keep", "drain", "abort"] = "keep"
    """What happens to running generations; see `RolloutClient.begin_weights`."""
    model: ModelName = POLICY
    """The model of the service whose weights these are, and which rolls out: a `name` of `[[backends]]`, or of an
    adapter."""
    lora: bool = False
    """Publish verl's LoRA as an adapter, which engines of `served` serve as `model`; otherwise it must be merged."""
    base: str = ""
    """With `lora`, the `name` of the backends of `served`, if backends of several models have adapter slots."""


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`trainer.v1.prorl`: how prompts are rolled out."""

    parameter_sync_step: Annotated[int, Meta(ge=1, le=1)] = 1
    """verl's: weights are published after each step."""
    num_warmup_batches: Annotated[float, Meta(ge=0)] = 0
    """verl's: batches of rollouts in flight while the policy learns; 0: none. Ignored unless `keep` is `all`, since
    otherwise rollouts always continue."""
    make_job: str | None = None
    """`package.module.function` that makes the job of a row; None: the columns `task` and `instance` are the job."""
    turn_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of one turn; None: `response_length`. Ignored with `make_job`."""
    too_long: TooLong = "drop"
    """What happens to a row of more than `prompt_length + response_length` tokens."""
    record: tuple[str, ...] = ()
    """Records that each rollout must have, of those that verl takes: `experts` (`actor.router_replay.mode: R3`). The
    service replaces a rollout without one."""
    keep: str = "all"
    """Which groups are trained on: `all` of verl's requested prompts, or the groups of `open_batch(keep=…)`, such as
    `informative`, of as many prompts as needed."""
    batch: dict[str, Any] = {}
    """More options of `open_batch`, such as `weight`: those of `BATCH` or, unless `keep` is `all`, of `SAMPLED`."""
    away_s: float = 600.0
    """How long rollouts may wait for an unavailable service, in seconds, before the training ends; weights wait 10
    minutes."""


def service_options(config: Any) -> ServiceOptions:
    """Read `ServiceOptions` from a whole configuration.

    Raises:
        ConfigError: a key is unknown or missing, or its value is invalid.
    """
    return read_service(config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.get(NAME))


def read_service(given: Any) -> ServiceOptions:
    """Read the section of `ServiceOptions`; raise `ConfigError` as `service_options` does."""
    options = _read(given, ServiceOptions, SERVICE_KEYS)
    for name in ("served", "folder"):
        if not getattr(options, name):
            raise ConfigError(f"{SERVICE_KEYS}.{name} is not set", key=f"{SERVICE_KEYS}.{name}")
    return options


def rollout_options(config: Any) -> RolloutOptions:
    """Read `RolloutOptions` from a whole configuration.

    Raises:
        ConfigError: a key is unknown, or its value is invalid.
    """
    options = _read(config.trainer.v1.get(NAME), RolloutOptions, ROLLOUT_KEYS)
    known = BATCH if options.keep == "all" else SAMPLED
    if unknown := sorted(options.batch.keys() - known):
        raise ConfigError(
            f"{ROLLOUT_KEYS}.batch: {', '.join(unknown)} cannot be set here, only {', '.join(sorted(known))}",
            key=f"{ROLLOUT_KEYS}.batch",
        )
    return options


def job_maker_of(config: Any) -> JobMaker:
    """Return the function that makes a row's job: with verl's turns and lengths, unless `make_job` is set."""
    options = rollout_options(config)
    if options.make_job:
        return load_function(options.make_job)  # type: ignore[no-any-return]
    rollout = config.actor_rollout_ref.rollout
    turns = rollout.multi_turn.get("max_assistant_turns") or EpisodeLimits().max_turns
    limits = EpisodeLimits(max_turns=turns, max_tokens=rollout.prompt_length + rollout.response_length)
    return job_maker(limits, max_tokens=options.turn_tokens or rollout.response_length)


def _read(given: Any, kind: type[Options], keys: str) -> Options:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given or {}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{keys}: {error}", key=keys) from None
