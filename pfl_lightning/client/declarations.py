"""What a method declares: the shared, personal and fixed parts of its model, and the terms of its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import lightning as L
from torch import Tensor, nn

from pfl_lightning.checks import check_names
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.options import BatchNorm
from pfl_lightning.phases import Phase
from pfl_lightning.state.tensors import matching, norm_names

if TYPE_CHECKING:
    from pfl_lightning.drop_in.client.user_module import UserModule


class Declarations(L.LightningModule):
    """Names of a method: parameters and buffers that it shares, keeps or fixes, for any model; terms of its loss.

    A loss term that does not exist is refused, and so is one that a phase does not name: it would train silently.
    """

    shared: tuple[str, ...] = ("encoder.*", "head.*")
    """Patterns of the parameters and buffers that clients and server exchange; the others are personal."""

    heads: tuple[str, ...] = ("head.*",)
    """Patterns of the parameters that ``fine_tune="head"`` trains."""

    fixed: tuple[str, ...] = ()
    """Patterns of the parameters and buffers that keep their first value, the same for every client."""

    not_exported: ClassVar[tuple[str, ...]] = ()
    """Patterns of the parameters and buffers that an exported client goes without: they serve its next fit alone."""

    batch_norm: BatchNorm = "shared"
    """Batch normalization inside the shared part: shared with it (``"shared"``), shared but for its running statistics
    (``"own_statistics"``), or personal (``"own"``)."""

    shares_buffers: ClassVar[bool] = True
    """Whether buffers in the shared part are shared, too, such as running statistics."""

    eval_model: str = "aggregated"
    """Model of a client that is evaluated: its personal state with what the server would send now (``"aggregated"``),
    or the model after the client's last local fit, before the averaging (``"trained"``)."""

    eval_models: ClassVar[tuple[str, ...]] = ("aggregated", "trained")
    """Values that :attr:`eval_model` may have."""

    frozen: frozenset[str] = frozenset()
    """Names of the parameters, and of buffers of their layers, that were frozen (``requires_grad=False``) when the
    client was made. They never change, so that the clients' module holds them once for all clients: they neither
    travel nor are stored."""

    user_module: UserModule | None = None
    """The model that a user brings as a LightningModule; ``None`` for an encoder with a head."""

    never_trained: frozenset[str] = frozenset()
    """Names of parameters that no phase trains, beside the frozen ones: those of a network that follows another."""

    buffers_change: bool = False
    """Whether a fit or an evaluation may change names and shapes of buffers, as a user's module may."""

    paper_batch_size: ClassVar[int | None] = None
    """Batch size of the paper; with smaller batches a round takes more steps, which may diverge."""

    phase: Phase
    """Phase of the local fit that the client is in."""

    def remedies(self) -> tuple[str, ...]:
        """What to try when the training diverges, beside a smaller learning rate and larger batches."""
        return ()

    def __getattr__(self, name: str) -> Any:
        """Encoder and head of a user's module, which are no layers of the client by themselves; else as in torch."""
        if name in ("encoder", "head") and self.user_module is not None:
            return getattr(self.user_module, name)
        return super().__getattr__(name)

    @property
    def step_module(self) -> L.LightningModule:
        """The module whose steps and hooks a local fit calls."""
        return self if self.user_module is None else self.user_module.step_module

    def restore_buffers(self) -> None:
        """Bring buffers back to their first names and shapes, which a user's module may change; nothing by default.

        Called before a state is loaded, and after a local fit and an evaluation, where ``buffers_change`` is set.
        """
        if self.user_module is not None:
            self.user_module.restore_buffers()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers but those that a user's module keeps in evaluation mode."""
        super().train(mode)
        if mode and self.user_module is not None:
            self.user_module.keep_evaluating()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All parameters and persistent buffers, whatever a user's module lets its own ``state_dict`` give."""
        if self.user_module is None:
            return super().state_dict(*args, **kwargs)
        return self.user_module.state_of_client(super().state_dict, *args, **kwargs)

    def match(self, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """Names that match one of a method's patterns, such as ``encoder.*``.

        Raises:
            ConfigurationError: A pattern matches none of them, or the patterns are one string.
        """
        if self.user_module is not None:
            return self.user_module.match(names, patterns)
        if isinstance(patterns, str):
            check_names(f"patterns of {type(self).__name__} (shared, heads, fixed)", patterns)
        return list(matching(tuple(names), tuple(patterns)))

    def trained_names(self, phase: Phase) -> set[str]:
        """Names of the parameters that train in a phase; not those that are frozen."""
        return (
            set(self.match([name for name, _ in self.named_parameters()], phase.train))
            - self.frozen
            - self.never_trained
        )

    def frozen_norms(self) -> Iterator[nn.Module]:
        """Normalization layers that use their running statistics in the current phase and do not change them.

        They are those of the parts that do not train; with ``batch_statistics`` only of those that never train.
        """
        if self.user_module is not None:
            yield from self.user_module.frozen_norms()
            return
        parts = dict(self.named_children())
        for name in [name for name, child in parts.items() if isinstance(child, nn.ModuleDict)]:
            whole = parts.pop(name)  # an encoder with its head
            parts |= {f"{name}.{own}": part for own, part in whole.named_children()}
        for name, part in parts.items():
            parameters = dict(part.named_parameters())
            if any(parameter.requires_grad for parameter in parameters.values()):
                continue
            names = [] if parameters else [f"{name}.{own}" for own, _ in part.named_buffers()]
            if any(fnmatchcase(own, pattern) for own in names for pattern in self.phase.train):
                continue  # of normalization without parameters
            goes_on = self.phase.batch_statistics and not self.frozen.issuperset(f"{name}.{own}" for own in parameters)
            if not goes_on:
                yield from (layer for layer in part.modules() if isinstance(layer, nn.modules.batchnorm._NormBase))

    def find_frozen(self, network: nn.Module) -> frozenset[str]:
        """Names of what is frozen in a network that is part of the client, and of :meth:`constant_layers`' buffers."""
        fixed = {id(parameter) for parameter in network.parameters() if not parameter.requires_grad}
        if not fixed:
            return frozenset()
        found = {name for name, p in self.named_parameters(remove_duplicate=False) if id(p) in fixed}
        still = {id(layer) for layer in self.constant_layers()} & {id(layer) for layer in network.modules()}
        for prefix, layer in self.named_modules(remove_duplicate=False):
            if id(layer) in still:
                found |= {name for name, _ in layer.named_buffers(prefix, recurse=False)}
        found &= self.state_dict().keys()
        return frozenset(found if self.user_module is None else self.user_module.chosen_frozen(network, found))

    def constant_layers(self) -> Iterator[nn.Module]:
        """Layers whose buffers do not change, now that the frozen parameters are known."""
        return self.frozen_norms() if self.user_module is None else self.user_module.constant_layers()

    def shared_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that clients and server exchange."""
        own = set() if self.batch_norm == "shared" else norm_names(self, affine=self.batch_norm == "own")
        own |= self.frozen
        found = [name for name in self.match(self.state_dict().keys(), self.shared) if name not in own]
        found = found if self.user_module is None else self.user_module.shared_names(found)
        if self.shares_buffers:
            return found
        trained = {name for name, _ in self.named_parameters()}
        return [name for name in found if name in trained]

    def personal_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that stay with the client."""
        elsewhere = {*self.shared_names(), *self.fixed_names(), *self.frozen}
        return [name for name in self.state_dict() if name not in elsewhere]

    def kept_names(self) -> list[str]:
        """Names of the tensors stored after a local fit: the personal state, or all that is evaluated."""
        if self.eval_model == "aggregated":
            return self.personal_names()
        elsewhere = {*self.fixed_names(), *self.frozen}
        return [name for name in self.state_dict() if name not in elsewhere]

    def fixed_names(self) -> list[str]:
        """Names of the parameters and persistent buffers that keep their first value."""
        found = [name for name in self.match(self.state_dict().keys(), self.fixed) if name not in self.frozen]
        return found if self.user_module is None else self.user_module.fixed_names(found)

    def exported_names(self) -> list[str]:
        """Names of the client's tensors for prediction in :meth:`~pfl_lightning.FederatedClient.exported_module`."""
        if self.user_module is not None:
            return self.user_module.exported_names()
        own = list(self.state_dict())  # of which what a message brings, such as prototypes, may not be there yet
        return [name for name in own if not any(fnmatchcase(name, pattern) for pattern in self.not_exported)]

    # ------------------------------------------------------------------ terms of the loss

    loss_names: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    """Names of the terms that :meth:`~pfl_lightning.client.FederatedClient.loss_terms` may return, and that a
    :class:`~pfl_lightning.phases.Phase` may choose from."""

    exported_losses: ClassVar[tuple[str, ...] | None] = None
    """Names of the loss terms in a step of an exported model, outside a federation; ``None`` for those of a
    personalization."""

    personalization_losses: ClassVar[tuple[str, ...] | None] = None
    """Names of the loss terms in a personalization or a fine-tuning; ``None`` for ``loss_names``."""

    def check_phases(self) -> None:
        """Refuse what is no tuple of phases, and phases with loss terms that there are not; before the first round."""
        for name in ("phases", "personalization_phases"):
            found = getattr(self, name)()
            if not isinstance(found, tuple | list) or not all(isinstance(phase, Phase) for phase in found):
                raise ConfigurationError(
                    f"{type(self).__name__}.{name} must return a tuple of phases, got {found!r}: "
                    'return (Phase("name", train=("head.*",)),), with a comma after a single phase, too'
                )
            for phase in found:
                phase.check_numbers()
                self.check_phase(phase)

    def check_phase(self, phase: Phase) -> None:
        """Refuse a phase that names loss terms which the method does not have, or has a string for a tuple.

        Raises:
            ConfigurationError: Names the phase, the loss term, and the terms there are; or the string.
        """
        for names in ("loss_names", "personalization_losses"):
            check_names(f"{type(self).__name__}.{names}", getattr(self, names))
        check_names(f"train of phase {phase.name!r}", phase.train)
        check_names(f"losses of phase {phase.name!r}", phase.losses)
        for name in phase.losses or ():
            self._check_loss_name(name, f"its phase {phase.name!r} names")

    def _check_loss_name(self, name: str, origin: str) -> None:
        known = (*self.loss_names, *(self.personalization_losses or ()))
        if name not in known:
            raise ConfigurationError(
                f"{type(self).__name__} has no loss term {name!r}, which {origin}: there are "
                f"{', '.join(dict.fromkeys(known))}; a new term must be named in loss_names"
            )

    def uses(self, loss: str) -> bool:
        """Return whether a loss term is part of the current phase's loss.

        Raises:
            ConfigurationError: The method declares no such term in ``loss_names``.
        """
        used = loss in (self.loss_names if self.phase.losses is None else self.phase.losses)
        if not used:
            self._check_loss_name(loss, "loss_terms asks for")
        return used

    def sum_of_terms(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Output of ``training_step``: the sum of the loss terms as ``"loss"``, and each of them detached.

        Raises:
            ConfigurationError: A term that the current phase does not name, no term at all, or one that is no scalar.
        """
        given = terms if isinstance(terms, dict) else {"loss_terms": terms}
        wrong = [(name, one) for name, one in given.items() if not isinstance(one, Tensor) or one.ndim]
        if wrong or given is not terms:
            name, one = wrong[0] if wrong else ("loss_terms", terms)
            came = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__name__}"
            raise ConfigurationError(
                f"{type(self).__name__}.loss_terms must return a dictionary of scalar tensors, such as means over the "
                f"batch, got {came}" + (f" for {name!r}" if given is terms else "")
            )
        chosen = self.phase.losses
        surplus = [] if chosen is None else [name for name in terms if name not in chosen]
        if surplus or not terms:
            raise ConfigurationError(
                f"phase {self.phase.name!r} of {type(self).__name__} has the loss terms "
                f"{self.loss_names if chosen is None else chosen}, loss_terms returned {list(terms)}: return those "
                "for which self.uses(name) is true, and name new terms in loss_names and in the phase's losses"
            )
        loss = cast(Tensor, sum(terms.values()))
        return {"loss": loss} | {name: term.detach() for name, term in terms.items()}
