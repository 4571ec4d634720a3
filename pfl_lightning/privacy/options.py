"""Options of client-level differential privacy."""

from __future__ import annotations

from dataclasses import dataclass

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.errors import ConfigurationError


@dataclass(frozen=True)
class ClientPrivacy:
    """Client-level differential privacy of what the server sends (DP-FedAvg, McMahan et al., ICLR 2018, Algorithm 1).

    In every round each client takes part with probability q, by a draw of its own (Poisson sampling); q is the loop's
    ``cohort`` as a share of all clients. Contributions are bounded and summed, Gaussian noise is added, and the sum is
    divided by q m, the expected size of a cohort, whoever took part and whatever samples they have.

    Weights: the change of all of them together has a norm of at most S. Class means: each has a norm of at most
    ``class_norm``, all clients count the same, and numbers of samples become the number of clients that have the class,
    with noise. The noise of each kind of content has a standard deviation of its sensitivity times the multiplier z
    times the root of the number of kinds, so that together they are one Gaussian mechanism of multiplier z.

    Args:
        noise_multiplier: z, the noise in units of the sensitivity.
        clip_norm: S; the first one, where it is adaptive.
        class_norm: Bound on the norm of the mean of each class; a class covariance has its square.
        delta: Probability beyond epsilon; ``None`` is m^-1.1, for m clients.
        quantile: Share of updates that S should not clip: S follows it, by a noisy count of them (Andrew et al.,
            NeurIPS 2021, Algorithm 1). ``None`` leaves S as it is.
        clip_rate: eta_C, how fast it follows.
        accountant: ``"rdp"``, Renyi differential privacy, or ``"prv"``, privacy loss distributions, whose epsilon is
            lower and takes a good part of a second after each round.
        max_epsilon: Largest epsilon. A run whose planned rounds exceed it is refused.
        stop: Whether such a run begins, and ends before the round that would exceed it.
    """

    noise_multiplier: float
    clip_norm: float = 1.0
    class_norm: float = 1.0
    delta: float | None = None
    quantile: float | None = None
    clip_rate: float = 0.2
    accountant: str = "rdp"
    max_epsilon: float | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigurationError: Names the first that is out of bounds.
        """
        for name in ("noise_multiplier", "clip_norm", "class_norm", "clip_rate"):
            check_number(name, getattr(self, name), strict=True)
        for name, value in (("delta", self.delta), ("quantile", self.quantile)):
            check_between(name, value, 0, 1, optional=True)
            check_number(name, value, strict=True, optional=True)
        check_number("max_epsilon", self.max_epsilon, strict=True, optional=True)
        check_choice("accountant", self.accountant, ("rdp", "prv"))
        check_choice("stop", self.stop, (True, False))
        if self.stop and self.max_epsilon is None:
            raise ConfigurationError("stop=True ends a run before max_epsilon is exceeded: set max_epsilon, too")
