"""A round of pFL-SSL (Chen et al., ICDCS 2024, section III-B) with SimCLR in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from . import Loop, Setting, State, copied, mean_of
from .self_supervised import nt_xent, simclr_projector

TEMPERATURE = 0.2


class PFLSSL(Loop):
    """Encoder and projector are averaged by numbers of samples, heads stay and do not train."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        encoder = setting.make_encoder()
        projector = simclr_projector(int(encoder.out_features))
        self.model = nn.ModuleDict({"encoder": encoder, "projector": projector}).to(setting.dtype)

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained, sizes = list[State](), list[float]()
        for client, (_, labels) in enumerate(self.setting.data):
            self.model.load_state_dict(self.server)
            self.fit(client, number)
            trained.append(copied(self.model, ""))
            sizes.append(len(labels))
        self.server = mean_of(trained, sizes)

    def fit(self, client: int, round: int) -> None:
        """Train encoder and projector on two views of a client's images; nothing is augmented here."""
        model, (inputs, _) = self.model, self.setting.data[client]
        optimizer = torch.optim.SGD(model.parameters(), **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            views = torch.cat([inputs[batch], inputs[batch]])
            projected = model["projector"](model["encoder"](views))
            loss = nt_xent(*projected.chunk(2), TEMPERATURE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
