"""`AdapterModels`: LoRA adapters as models of their own: whose weights they adapt, and which versions must stay. Pure.

An adapter is published by its first load, to the backends with adapter slots of one base model. Its jobs go to backends
that have loaded its wanted version last; a backend that lacks it is asked to load it (see `WeightRequests`), and gets
none of its jobs until then. During an update, backends that have loaded the new version get jobs once more than half of
those asked have read the same files. A backend that read other files than most unloads them, and serves nothing of
them meanwhile. An engine unloads a version that is neither current nor being loaded, and to which no attempt is pinned
(see `version_pins`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import EngineFailed, MalformedMessage, NoBackend
from .version_pins import VersionPins

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from ...wire.messages.backends import Assign, Backend
    from ...wire.messages.engines import WeightUpdate
    from .backend_member import Member


class AdapterModels:
    """The adapters of a heap's backends.

    Args:
        wanted: the wanted version of each model that was updated.
        begun: the versions of updates in progress, by model.
    """

    def __init__(self, wanted: Mapping[str, int], begun: Mapping[str, int]) -> None:
        self._wanted = wanted
        self._begun = begun
        self.bases: dict[str, str] = {}
        """The models that adapters adapt, by the adapters' models."""
        self.pins = VersionPins()
        self._agreed: dict[str, set[str]] = {}
        """The backends that have loaded the same files as most in an update in progress, by model."""
        self._wrong: dict[str, dict[str, set[int]]] = {}
        """The versions that backends loaded from other files than most, by backend and model."""
        self._left: dict[str, set[str]] = {}
        """Backends that had an earlier adapter of the same name when a model was first loaded, by model."""

    def __contains__(self, model: str) -> bool:
        return model in self.bases

    def base(self, model: str) -> str:
        """Return the model whose backends serve a model: the one that it adapts, or itself."""
        return self.bases.get(model, model)

    def published(self) -> dict[str, int]:
        """Return the current versions of the adapters that have one, by model."""
        return {model: self._wanted[model] for model in self.bases if model in self._wanted}

    def unpublished(self) -> set[str]:
        """Return the adapters that have no current version yet."""
        return self.bases.keys() - self._wanted.keys()

    def served(self, backend: Backend) -> tuple[str, ...]:
        """Return the models whose jobs a backend can get: its own, and the adapters that it has loaded."""
        adapters = (
            model
            for model, versions in backend.adapters.items()
            if self.bases.get(model) == backend.name and self._is_served(backend.backend_id, model, versions[-1])
        )
        return (backend.name, *adapters)

    def _is_served(self, backend_id: str, model: str, version: int) -> bool:
        """Return whether jobs can get the version that a backend loaded last."""
        if version in self.wrong(backend_id, model):
            return False
        is_new = version == self._begun.get(model) and backend_id in self._agreed.get(model, ())
        return is_new or version == self._wanted.get(model)

    def missing(self, backend: Backend) -> dict[str, int]:
        """Return the adapters that a backend should have loaded last, and their versions."""
        if not backend.adapter_slots:
            return {}
        return {
            model: version
            for model, version in self.published().items()
            if self.bases[model] == backend.name
            and (backend.adapters.get(model, ())[-1:] != (version,) or version in self.wrong(backend.backend_id, model))
        }

    def forget(self, model: str) -> None:
        self.bases.pop(model, None)
        self._agreed.pop(model, None)
        self._left.pop(model, None)

    def update_begins(self, model: str, base: str, loaded: Iterable[str]) -> None:
        """Record an adapter's base, and forget which backends agreed in an earlier update, if that has ended.

        Args:
            model: the adapter.
            base: the model that it adapts.
            loaded: backends that have, or had when they fell silent, versions of it: of an earlier adapter of this name
                if it is the first load.
        """
        if model not in self.bases:
            self._left[model] = set(loaded)
        self.bases[model] = base
        if model not in self._begun:
            self._agreed.pop(model, None)

    def agree(self, model: str, backends: set[str]) -> set[str]:
        """Record which backends have read the same files as most in a model's update; return those that are new."""
        known = self._agreed.setdefault(model, set())
        new = backends - known
        known |= new
        return new

    def wrong(self, backend_id: str, model: str) -> set[int]:
        """Return the versions that a backend loaded from other files than most, until it has unloaded them."""
        return self._wrong.get(backend_id, {}).get(model, set())

    def note_wrong(self, backend_id: str, model: str, version: int) -> None:
        self._wrong.setdefault(backend_id, {}).setdefault(model, set()).add(version)

    def to_unload(self, backend: Backend) -> list[str]:
        """Return the models of which a backend must unload wrong versions."""
        return list(self._wrong.get(backend.backend_id, ()))

    def registered(self, backend: Backend) -> None:
        """Forget the wrong versions that a backend no longer has."""
        for model in self.to_unload(backend):
            self._forget_wrong(backend.backend_id, model, backend.adapters.get(model, ()))

    def _forget_wrong(self, backend_id: str, model: str, loaded: Iterable[int]) -> None:
        wrong = self._wrong.get(backend_id, {})
        if model in wrong:
            wrong[model].intersection_update(loaded)
            if not wrong[model]:
                del wrong[model]
            if not wrong:
                del self._wrong[backend_id]

    def problems(self, member: Member) -> dict[str, str]:
        """Return why a backend gets no jobs of adapters of its model, by the adapters' models."""
        return {
            model: member.adapter_notes.get(model, f"it has not loaded version {version} yet")
            for model, version in self.missing(member.backend).items()
            if model not in member.models
        }

    def needed(self, model: str) -> set[int]:
        """Return the versions of an adapter that must stay loaded."""
        return self.pins.versions(model) | self._serving(model)

    def needed_by(self, backend: Backend, model: str, *, informed: bool) -> set[int]:
        """Return the versions of an adapter that a backend must keep: its last one at least, which its jobs have.

        Args:
            backend: its state.
            model: the adapter's; of another model, it keeps nothing.
            informed: whether it is known to which versions jobs are pinned; if not, it keeps all.
        """
        if model not in self:
            return set()
        loaded = backend.adapters.get(model, ())
        return self.needed(model).union(loaded[-1:] if informed else loaded)

    def _serving(self, model: str) -> set[int]:
        return {one[model] for one in (self._wanted, self._begun) if model in one and model in self.bases}

    def answered(self, request: WeightUpdate, backend_id: str) -> None:
        """Record that a backend completed a step; it has then unloaded all unneeded versions."""
        self._forget_wrong(backend_id, request.model, request.keep)
        if request.model in self._left:
            self._left[request.model].discard(backend_id)

    def _check_left(self, model: str, version: int, loaded: Mapping[str, tuple[int, ...]]) -> None:
        left: Container[str] = self._left.get(model, ()) if model in self.bases else loaded
        for backend_id, versions in loaded.items():
            if backend_id in left and version in versions:
                raise EngineFailed(
                    f"backend {backend_id} may still have version {version} of an earlier adapter {model}: start that "
                    f"engine, remove it (`prorl backends remove {backend_id}`), or publish another version",
                    backend=backend_id,
                )

    def find_base(
        self,
        request: WeightUpdate,
        backends: Iterable[Backend],
        own: set[str],
        loaded: Mapping[str, tuple[int, ...]],
    ) -> str:
        """Return the base of the adapter that a request is about.

        Args:
            request: its model is no backend's own.
            backends: all backends.
            own: the models that are backends' own.
            loaded: the versions of the adapter that backends have, or had when they fell silent, by backend.

        Raises:
            NoBackend: no backend takes the adapter, or several bases could be meant.
            MalformedMessage: the step is not for adapters.
            EngineFailed: a backend may have other weights as this version, of an adapter that was removed.
        """
        model, known = request.model, self.bases.get(request.model, "")
        bases = sorted({one.name for one in backends if one.adapter_slots})
        if request.step == "remove" and not known:
            adapters = ", ".join(sorted(self.bases)) or "none"
            raise NoBackend(f"no adapter is published as the model {model}; adapters: {adapters}")
        if not known and not bases:
            there_are = f"no backend serves the model {model} (there are {', '.join(sorted(own))})"
            raise NoBackend(
                f"{there_are if own else 'no backend is registered'}, so none has taken the weights; see `prorl "
                "backends list`. An adapter needs backends with `lora` in `[[backends]]`"
            )
        if request.step not in ("load", "remove"):
            raise MalformedMessage(
                f"{model} is no backend's own model but an adapter, of which only a folder can be loaded: the step "
                f"`{request.step}` is for engines' own weights",
                field="$.step",
            )
        if request.step == "remove":
            return known
        base = request.base or known or (bases[0] if len(bases) == 1 else "")
        if not base:
            raise NoBackend(f"the adapter {model} could be of {' or '.join(bases)}: name its base", final=True)
        if known and base != known:
            raise NoBackend(f"{model} is an adapter of {known}, not of {base}; remove the model first", final=True)
        if base not in bases:
            named = f", or name one of {', '.join(bases)} as the base" if bases else ""
            may_come = base in own and all(one.name != base for one in backends)
            slots = f"backends of the model {base} have no adapter slots"
            problem = slots if base in own else f"no backend serves the base model {base}"
            raise NoBackend(f"{problem}: start one with `lora`{named}", final=not may_come)
        self._check_left(model, request.weight_version, loaded)
        return base

    def having(
        self, members: Iterable[Member], request: Assign, offers: Container[str], *, begun: bool, anyhow: bool
    ) -> str | None:
        """Return the least loaded backend with the version of an adapter to which a job is pinned.

        It is ready, if possible another one than the left one, and not closed unless the rollout has begun; or it is on
        probation and offered, or, with `anyhow`, not offered.
        """
        found: dict[tuple[int, float], str] = {}
        for member in members:
            backend = member.backend
            if request.pinned not in backend.adapters.get(request.model, ()):
                continue
            if request.pinned in self.wrong(backend.backend_id, request.model):
                continue
            is_left = backend.backend_id == request.leaving
            if member.state == "ready" and (begun or is_left or not member.is_closed):
                rank = 2 if is_left else 0
            elif member.state == "probation" and backend.backend_id in offers and not is_left:
                rank = 1
            elif member.state == "probation" and anyhow:
                rank = 3
            else:
                continue
            found[rank, len(member.jobs) / backend.weight] = backend.backend_id
        return found[min(found)] if found else None
