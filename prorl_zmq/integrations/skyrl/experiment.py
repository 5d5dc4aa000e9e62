"""`ProrlExp`: SkyRL's experiment with rollouts by this service. Needs SkyRL (0.3) and the extra `[train]`.

`trainer.override_entrypoint=prorl_zmq.integrations.skyrl.experiment` calls `main`. The section `prorl` of the
configuration is `ProrlConfig`.
"""

# No `from __future__ import annotations`: SkyRL reads the types of the configuration's fields.

import asyncio
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

from ...client.blocking.client import RolloutClient
from ...errors import ConfigError
from ...weights_publisher import WeightsForm, WeightsPublisher
from ...wire.messages.base import POLICY
from ...wire.messages.engines import UpdateMode
from ...wire.messages.jobs import EpisodeLimits, Job
from ...wire.records import EXPERTS
from ..dataset_rows import job_maker
from ..recorded import Asked
from ..session import check_version
from .generator import Generator

TESTED = "0.3"
"""The tested version of SkyRL."""
OVERRIDE = "trainer.override_entrypoint="
NOT_HERE = (
    *("apply_overlong_filtering", "zero_reward_on_non_stop", "vision_language_generator", "batched"),
    *("chat_template", "chat_template_kwargs", "use_conversation_multi_turn"),
)
"""Options under `generator` of SkyRL's own generator only; here the engine has the chat format."""

try:
    import ray
    from skyrl.train.config import BaseConfig, SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
    from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray
except ImportError:
    check_version("skyrl", TESTED)  # reports the version first
    raise


@dataclass
class ProrlConfig(BaseConfig):  # type: ignore[misc]
    """The section `prorl` of the configuration."""

    endpoint: str | None = None
    """The service's front door; None: that of `prorl serve` without a topology file."""
    keys: str | None = None
    """Folder of keys, or the secret key's file, for a service over TCP; None: `$PRORL_KEYS`."""
    timeout_s: float = 60.0
    """Longest wait for an answer of the service, in seconds."""
    away_s: float = 600.0
    """How long the service may be unavailable during rollouts, in seconds; while weights are loaded, ten minutes."""
    served_model: str | None = None
    """Folder of the model that the engines were started with; None: `trainer.policy.model.path`."""
    weights_folder: str | None = None
    """Where weights are written, at the same path on all engine hosts and the trainer's machines. None:
    `export_path`/weights."""
    weights_form: WeightsForm = "full"
    """What is written: `full`, all weights, or `delta`, what changed since the last step; see `WeightsPublisher`."""
    keep_weights: int = 2
    """How many folders of full weights are kept."""
    update_mode: UpdateMode = "keep"
    """What happens to running generations; see `RolloutClient.begin_weights`."""
    token_rewards: bool = False
    """Pass the rewards of turns at their tokens; otherwise a rollout's reward is one number, at its end."""
    model: str = POLICY
    """The model of the service that rolls out and whose weights are trained: a `name` of `[[backends]]`."""
    record: list[str] = field(default_factory=list)
    """Records that each training rollout must have, of those that SkyRL 0.3 takes: `experts`
    (`generator.inference_engine.enable_return_routed_experts`)."""
    batch: dict[str, Any] = field(default_factory=dict)
    """More options of `open_batch`, such as `max_replacements` and `weight`."""


@dataclass
class ProrlTrainConfig(SkyRLTrainConfig):  # type: ignore[misc]
    """SkyRL's configuration, with the section `prorl`."""

    prorl: ProrlConfig = field(default_factory=ProrlConfig)


class InferenceClient:
    """Replaces SkyRL's client of its engines, which a simulated training calls; the service pauses its engines."""

    def __init__(self) -> None:
        self.weight_version = 0

    async def pause_generation(self) -> None:
        """Do nothing."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    def increment_weight_version(self) -> None:
        """Count the trainer's weight updates."""
        self.weight_version += 1


class ServedWeights:
    """Publishes a trainer's weights before its first step and after each; the version is its global step.

    SkyRL's workers gather and save the model, whatever their sharding; its tensors are cast to the served model's
    dtypes.

    Args:
        trainer: SkyRL's `RayPPOTrainer` or `FullyAsyncRayPPOTrainer`, before its `train`.
        publisher: of this process only.
        folder: the publisher's folder, under the same path on the trainer's machines.
    """

    def __init__(self, trainer: Any, publisher: WeightsPublisher, folder: Path) -> None:
        self._trainer = trainer
        self._publisher = publisher
        self._saved = folder / ".saved"
        trainer.init_weight_sync_state = self._begin

    def _begin(self) -> None:
        """Replace SkyRL's connection of its workers to its engines."""
        self._trainer.dispatch.save_weights_for_sampler = self.save_weights_for_sampler

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:  # noqa: ARG002 - as SkyRL's
        """Have all engines load the trainer's weights, while rollouts continue.

        Raises:
            ConfigError: the workers' files are missing here.
            ProrlError: as `WeightsPublisher.publish`.
        """
        await asyncio.to_thread(self._publish, self._trainer.global_step)

    def _publish(self, step: int) -> None:
        shutil.rmtree(self._saved, ignore_errors=True)  # left by a killed run
        try:
            self._trainer.dispatch.save_hf_model("policy", str(self._saved), self._trainer.tokenizer)
            done = self._publisher.publish(self._tensors(), step)
        finally:
            shutil.rmtree(self._saved, ignore_errors=True)
        seconds = done.seconds if done is not None else {}
        self._trainer.all_metrics |= {f"weights/{part}_s": value for part, value in seconds.items()}
        self._trainer.all_metrics["weights/version"] = step

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        files = sorted(self._saved.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"SkyRL's workers have saved the model, and nothing is in {self._saved} here: weights_folder must be "
                "seen under one path by all machines of the trainer and by all engine hosts",
                key="prorl.weights_folder",
            )
        with ExitStack() as stack:  # all stay open: the publisher tells tensors apart by their addresses
            for file in files:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)


class ProrlExp(BasePPOExp):  # type: ignore[misc]
    """A SkyRL experiment with rollouts by this service, and weights for its engines.

    The data sets have the columns `prompt`, `task` and `instance` (`dataset_rows` makes them from jobs); for others,
    override `make_job`. `generator.max_turns` limits turns, `sampling_params.max_generate_length` a turn's tokens, and
    its sum with `max_input_length` a conversation's.

    Args:
        cfg: the configuration.

    Raises:
        ConfigError: an option cannot be used here.
        InvalidJob: a data set's row cannot be made into a job; `field` names the column.
    """

    def __init__(self, cfg: ProrlTrainConfig) -> None:
        check_version("skyrl", TESTED)
        check_config(cfg)
        generator = cfg.generator
        length = generator.sampling_params.max_generate_length
        episode = EpisodeLimits(max_turns=generator.max_turns, max_tokens=generator.max_input_length + length)
        self._job_of_row = job_maker(episode, max_tokens=length)
        self._random = random.Random(cfg.trainer.seed)  # noqa: S311 - the order of prompts is not secret
        ours = cfg.prorl
        self._connect = partial(RolloutClient, ours.endpoint, keys=ours.keys, timeout_s=ours.timeout_s)
        self._publisher: WeightsPublisher | None = None
        self._generator: Generator | None = None
        super().__init__(cfg)

    def make_job(self, prompt: Any, env_class: str, env_extras: dict[str, Any]) -> Job:  # noqa: ARG002 - for overriding
        """Make the job of a row from its messages, its environment's name, and its other columns."""
        return self._job_of_row(env_extras)

    def get_train_dataset(self) -> Any:
        """Return SkyRL's data set, after checking each row."""
        return self._checked(super().get_train_dataset())

    def get_eval_dataset(self) -> Any:
        """Return SkyRL's data set, after checking each row; None: there is none."""
        return self._checked(super().get_eval_dataset())

    def get_inference_client(self) -> InferenceClient:
        """Return the replacement of SkyRL's engines; none are started."""
        return InferenceClient()

    def get_generator(self, cfg: ProrlTrainConfig, tokenizer: Any, inference_engine_client: Any) -> Generator:  # noqa: ARG002
        """Return the generator that rolls out by the service."""
        self._generator = Generator(
            self.make_job,
            connect=self._connect,
            step_wise=cfg.generator.step_wise_trajectories,
            token_rewards=cfg.prorl.token_rewards,
            spare=self._spare,
            away_s=cfg.prorl.away_s,
            options=cfg.prorl.batch,
            asked=Asked.of("SkyRL 0.3", (EXPERTS,), cfg.prorl.model, cfg.prorl.record),
        )
        return self._generator

    def get_trainer(self, cfg: ProrlTrainConfig, **parts: Any) -> Any:
        """Return SkyRL's trainer, which publishes its weights to the service.

        Raises:
            ConfigError: another trainer uses the folder of weights.
            InvalidWeights: the served model's folder cannot be read.
            RequestTimeout: the service does not answer.
        """
        if cfg.trainer.fully_async.simulate_training:
            return FullyAsyncTrainerSim(cfg=cfg, **parts)  # has no model and no weights
        kind = FullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else RayPPOTrainer
        trainer = kind(cfg=cfg, **parts)
        with self._connect() as client:
            client.status()  # fail before SkyRL loads models
        ours = cfg.prorl
        folder = Path(ours.weights_folder or Path(cfg.trainer.export_path, "weights")).absolute()
        served = ours.served_model or cfg.trainer.policy.model.path
        self._publisher = WeightsPublisher(
            self._connect,
            served,
            folder,
            form=ours.weights_form,
            keep=ours.keep_weights,
            mode=ours.update_mode,
            all_ranks=False,
            model=ours.model,
        )
        ServedWeights(trainer, self._publisher, folder)
        return trainer

    def run(self) -> None:
        """Train."""
        try:
            super().run()
            if self._generator is not None:
                print(self._generator.curve.conclusion(), flush=True)
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def _spare(self) -> Job:
        prompt, env_class, extras, _ = self.train_dataset[self._random.randrange(len(self.train_dataset))]
        return self.make_job(prompt, env_class, extras)

    def _checked(self, data: Any) -> Any:
        for index in range(len(data) if data is not None else 0):
            prompt, env_class, extras, _ = data[index]
            self.make_job(prompt, env_class, extras)
        return data


def check_config(cfg: ProrlTrainConfig) -> None:
    """Reject options that this service does not support or would ignore.

    Raises:
        ConfigError: `key` names the option.
    """
    if cfg.trainer.placement.colocate_all:
        raise ConfigError(
            "the service's engines have GPUs of their own: set trainer.placement.colocate_all=false",
            key="trainer.placement.colocate_all",
        )
    if cfg.trainer.policy.model.lora.rank > 0:
        raise ConfigError(
            "the service's engines load whole models, and SkyRL saves adapters apart: set "
            "trainer.policy.model.lora.rank=0",
            key="trainer.policy.model.lora.rank",
        )
    if cfg.prorl.weights_form not in get_args(WeightsForm):
        raise ConfigError(
            f"prorl.weights_form is one of {', '.join(get_args(WeightsForm))}, not {cfg.prorl.weights_form}",
            key="prorl.weights_form",
        )
    if cfg.prorl.update_mode not in get_args(UpdateMode):
        raise ConfigError(
            f"prorl.update_mode is one of {', '.join(get_args(UpdateMode))}, not {cfg.prorl.update_mode}",
            key="prorl.update_mode",
        )
    usual = ProrlTrainConfig().generator
    for name in NOT_HERE:
        if getattr(cfg.generator, name) != getattr(usual, name):
            raise ConfigError(f"only SkyRL's own generator has generator.{name}", key=f"generator.{name}")


def main() -> None:
    """Train with the command line's `key=value` words, as SkyRL's own entry point does."""
    cfg = ProrlTrainConfig.from_cli_overrides([word for word in sys.argv[1:] if not word.startswith(OVERRIDE)])
    check_config(cfg)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_train).remote(cfg))  # as in SkyRL: on any machine


def _train(cfg: ProrlTrainConfig) -> None:
    ProrlExp(cfg).run()


if __name__ == "__main__":
    main()
