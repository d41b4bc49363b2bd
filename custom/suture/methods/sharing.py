"""What of a model travels: what is exchanged in each round, what is sent once, and what stays at a site."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.models.classifier import HEADS, Classifier, Layout, NormPolicy, split_state
from suture.models.priors import PriorSpec
from suture.protocol.egress import shape_mismatches, zeros

if TYPE_CHECKING:
    from suture.methods.base import ClassFacts, GlobalModel, Method

Personal = Literal["nothing", "head", "model"]

_GATES = re.compile(r"(weight|bias)_(ih|hh)_l\d+(_reverse)?$")
"""Tensors of an LSTM, whose rows are those of its input, forget, cell and output gates in turn."""


@validated(frozen=True, config=STRICT)
class Share:
    """The part of each tensor that is shared.

    The head is shared only as a whole: its rows are classes, and half of a class has no meaning.

    Attributes:
        fraction: of the rows of each tensor, rounded down.
        of: the first ``rows`` of each tensor, as in the published program (of an LSTM the input and forget
            gates of all units); or whole hidden ``units`` of an LSTM, all four gates of the first of them.
        init: where a site's own part begins: at the ``server``'s values, or each at random by itself
            (``own``: Zhang et al. 2021, Algorithm 2, line 1).
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    of: Literal["rows", "units"] = "rows"
    init: Literal["server", "own"] = "server"

    def rows(self, name: str, length: int) -> Tensor:
        """The indices of the shared rows of a tensor with `length` rows."""
        if self.of == "units" and _GATES.search(name):
            units = length // 4
            first = torch.arange(int(self.fraction * units))
            return torch.cat([first + gate * units for gate in range(4)])
        return torch.arange(int(self.fraction * length))


@dataclass(frozen=True)
class SharingSpec:
    """Which tensors of the model travel in each round, and what a site stores and holds of its own.

    What does not travel in each round is sent once, before the first, and then is the site's own.

    Attributes:
        batch_norm: ``average`` (FedAvg); ``frozen`` (FedBN+), sent once; ``local`` (FedBN), the site's own.
        personal: what stays at the site: ``nothing``, its ``head``, or its whole ``model``. A personal method
            leaves a model at each site instead of a global one.
        share: the part of each tensor that travels; None for all of it. The rest is the site's own.
        keep_local: whether a site also stores the model that it trained in the best round, before
            aggregation, and in the end evaluates both on its test data; of methods with a global model.
        prior: the frozen network that sites compare their models with. Every party has the same file, and
            no message carries more of it than its digest.
    """

    batch_norm: NormPolicy = "average"
    personal: Personal = "nothing"
    share: Share | None = None
    keep_local: bool = False
    prior: PriorSpec | None = None

    @property
    def part_at_site(self) -> bool:
        """Whether a part of the model stays at each site, which stores that of the best round."""
        return self.personal != "nothing" or self.share is not None

    @property
    def head_at_site(self) -> bool:
        """Whether the head stays at each site, which exchanges what is before it."""
        return self.personal == "head" or (self.share is not None and self.share.fraction < 1)

    def shared(self, model: Classifier) -> tuple[str, ...]:
        """Names of the tensors outside the head that are exchanged each round, sorted."""
        if self.personal == "model":
            return ()
        local = model.counters | model.frozen_names
        local |= model.norm_names if self.batch_norm != "average" else frozenset()
        return tuple(sorted(n for n in model.names if not n.startswith(HEADS) and n not in local))

    def local(self, model: Classifier) -> tuple[str, ...]:
        """Names of the tensors that a site receives once and that then stay there, sorted.

        These are batch norm where it is not averaged, and what is personal. Where a part of each tensor is
        shared: the model, of which the shared rows replace those of the site.
        """
        names = set(model.names) - model.counters
        if self.share is None:
            names -= set(self.shared(model))
            names -= {n for n in names if n.startswith(HEADS)} if self.personal == "nothing" else set()
        return tuple(sorted(names))

    def layout(self, model: Classifier) -> Layout:
        """The layout of what a site exchanges each round, by its own model."""
        state, head = split_state(model.state_dict())
        shared = {name: state[name] for name in self.shared(model)}
        return Layout.of(*self.parts(shared, head), model.buffer_names)

    def parts(
        self, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parts of the shared tensors and of the head's rows that are exchanged each round.

        Raises:
            ConfigError: so small a part of the model is shared that no row is in it.
        """
        if self.share is None:
            return dict(shared), dict(head) if self.personal == "nothing" else {}
        rows = {name: tensor[self.share.rows(name, len(tensor))] for name, tensor in shared.items()}
        rows = {name: part for name, part in rows.items() if len(part)}
        if shared and not rows:
            raise ConfigError(
                f"method.share.fraction={self.share.fraction:g} is less than one row of every tensor of "
                "the model, so nothing would be shared; set it higher (0.5 is half)"
            )
        return rows, dict(head) if self.personal == "nothing" and self.share.fraction == 1 else {}

    def put(self, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors with the exchanged parts in their places."""
        if self.share is None:
            return {**whole, **parts}
        done = dict(whole)
        for name, part in parts.items():
            done[name] = whole[name].index_copy(0, self.share.rows(name, len(whole[name])), part)
        return done

    def stored(self, model: Classifier) -> dict[str, Tensor]:
        """What a site stores of its trained model, which is the model before aggregation.

        Local parameters are under ``fixed/``; the rest is under ``local/``, where local models are kept. What
        no round trains is stored once, not here.
        """
        state = {name: t for name, t in model.state_dict().items() if name not in model.frozen_names}
        fixed = [name for name in self.local(model) if name in state]
        rest = [name for name in state if name not in fixed] if self.keep_local else []
        stored = {f"fixed/{name}": name for name in fixed} | {f"local/{name}": name for name in rest}
        return {key: state[name].detach().cpu() for key, name in stored.items()}


def layout_of(model: GlobalModel, method: Method) -> Layout:
    """The layout of what is exchanged each round, by the server's model."""
    return Layout.of(*method.sharing.parts(model.shared, model.head), model.buffers)


def with_channels(model: GlobalModel, method: Method) -> GlobalModel:
    """The model with the channels of the method as they begin."""
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    return replace(model, channels={name: zeros(form, len(model.labels)) for name, form in forms.items()})


def check_channels(model: GlobalModel, method: Method) -> None:
    """Refuse a model of the server that lacks a channel, or has another than the method declares.

    Raises:
        ConfigError: names the first one.
    """
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    for name, wrong in shape_mismatches(forms, model.channels, len(model.labels)).items():
        raise ConfigError(
            f"{method.about.title} aggregates to a model whose channel {name!r} is {wrong}; return every "
            "channel that its egress declares as down or server, and no other"
        )


def check_facts(facts: ClassFacts, model: GlobalModel, method: Method) -> None:
    """Refuse facts of classes that the method does not declare, or of another form.

    Raises:
        ConfigError: names the first one.
    """
    forms = method.egress(layout_of(model, method)).forms("facts")
    told = {name: form for name, form in forms.items() if name in facts.tensors}
    for name, wrong in shape_mismatches(told, facts.tensors, len(model.labels)).items():
        raise ConfigError(
            f"{method.about.title} has a fact of classes, {name!r}, that is {wrong}; add Channel({name!r}, "
            "'facts', (CLASSES,)) with its shape to the channels of its egress"
        )
