"""FML: federated mutual learning."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_between
from pfl_lightning.client import Citation
from pfl_lightning.encoders import EncoderFactory
from pfl_lightning.functional import kl_divergence
from pfl_lightning.methods._partner import PartnerClient
from pfl_lightning.options import ClientOptions, Unpack


class FML(PartnerClient):
    """A personal network on every client, and a common one, the meme; on each batch they teach each other.

    Evaluated is the personal network; of a client that has never trained, the meme. Only memes travel.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ where ``partner`` is given.
        num_classes: Number of classes, C.
        partner: Encoder of the meme, the same for all clients: a registered name, or what makes one from the shape of a
            sample; ``None`` for a meme like the personal network.
        alpha: How much the personal network learns from labels, in [0, 1]; the rest it learns from the meme.
        beta: The same of the meme.
        by_samples: Whether the server weighs memes by the clients' numbers of samples; otherwise all count the same.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`, for both networks.
    """

    citation = Citation("Federated Mutual Learning", "Shen et al.", "arXiv", 2020)
    loss_names = ("cross_entropy", "mutual", "partner_cross_entropy", "partner_mutual")
    pair_losses = ("mutual", "partner_cross_entropy", "partner_mutual")

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        partner: str | EncoderFactory | None = None,
        alpha: float = 0.5,
        beta: float = 0.5,
        by_samples: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, partner=partner, **options)
        check_between("alpha", alpha, 0, 1)
        check_between("beta", beta, 0, 1)
        self.alpha, self.beta, self.by_samples = alpha, beta, by_samples

    def pair_terms(self, features: Tensor, partner_features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L of the personal network p and of the meme q; what teaches is a constant.

        L_p = alpha CE(p, y) + (1 - alpha) KL(q || p), L_q = beta CE(q, y) + (1 - beta) KL(p || q).
        """
        personal, meme = self.classify(features), self.partner.head(partner_features)
        terms = {
            "cross_entropy": self.alpha * F.cross_entropy(personal, labels),
            "partner_cross_entropy": self.beta * F.cross_entropy(meme, labels),
        }
        if self.alpha < 1:
            terms["mutual"] = (1 - self.alpha) * kl_divergence(meme.detach(), personal)
        if self.beta < 1:
            terms["partner_mutual"] = (1 - self.beta) * kl_divergence(personal.detach(), meme)
        return terms
