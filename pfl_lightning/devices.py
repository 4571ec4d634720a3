"""A seeded model of clients' devices: how fast they are, when they are there, how often they drop out."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, cast

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.data import client_number
from pfl_lightning.errors import ConfigurationError, NoSuchClientError
from pfl_lightning.seeding import Purpose, derive_seed

COLUMNS = ("seconds_per_step", "transfer_seconds", "availability", "dropout")
SPAN = ("start", "end")


@dataclass(frozen=True)
class Devices:
    """Properties of clients' devices; those that are not in the trace are drawn with the run's seed.

    Attributes:
        trace: A CSV file with a row for each client: its number or name in the column ``client``, and any of
            ``seconds_per_step``, ``transfer_seconds``, ``availability`` and ``dropout``, which take the places of the
            options of these names. With the columns ``start`` and ``end`` a client has a row for each span of simulated
            seconds in which it is there; they repeat after the last end of all.
        seconds_per_step: Simulated seconds of a local step; the median over clients.
        spread: Standard deviation of the logarithm of the clients' seconds a step, which are lognormal: under 1, one
            client of six takes more than 2.7 times the median.
        transfer_seconds: Simulated seconds of the messages down and up together.
        availability: Probability that a client is there when a round begins, a.
        diurnal: How much that changes over a day, d: a (1 + d cos 2 pi t / day), which must be at most 1.
        day: Length of a day in simulated seconds.
        dropout: Probability that a client that is there drops out of a round, before the server has sent it anything.
    """

    trace: str | None = None
    seconds_per_step: float = 1.0
    spread: float = 0.0
    transfer_seconds: float = 0.0
    availability: float = 1.0
    diurnal: float = 0.0
    day: float = 86400.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in (*COLUMNS, "spread", "diurnal", "day"):
            _checked(name, getattr(self, name))
        check_between("availability times 1 + diurnal", self.availability * (1 + self.diurnal), 0, 1 + 1e-9)


class Pace(NamedTuple):
    """How a client does in a round, in simulated seconds.

    Attributes:
        seconds_per_step: Of a local step.
        transfer_seconds: For the messages down and up together.
        stays: How long it stays; infinite where nothing is known of its leaving.
    """

    seconds_per_step: float
    transfer_seconds: float
    stays: float

    def steps(self, seconds: float) -> float:
        """Local steps after which the update is there in time: a whole number, or infinity."""
        left = (seconds - self.transfer_seconds) / self.seconds_per_step
        return left if left == math.inf else max(0, math.floor(left + 1e-9))


def _checked(name: str, value: Any, where: str = "") -> float:
    """The value of an option or, with the place of a file where it stands, of a column."""
    with suppress(TypeError, ValueError):
        value = float(value) if where else value
    if name in ("availability", "dropout", "diurnal"):
        check_between(where + name, value, 0, 1)
    else:
        check_number(where + name, value, strict=name in ("seconds_per_step", "day"))
    return cast(float, value)


class Fleet:
    """The devices of a federation's clients. Nothing is computed of a client before it is asked for.

    Args:
        devices: What they are like.
        data: The data module, which knows the clients' numbers and names.
        seed: The run's seed.

    Raises:
        ConfigurationError: The trace cannot be read, lacks clients, or has clients or numbers that cannot be.
    """

    def __init__(self, devices: Devices, data: Any, seed: int) -> None:
        self.devices, self._seed = devices, seed
        self._table, self._spans = dict[int, dict[str, float]](), dict[int, list[tuple[float, float]]]()
        for where, client, row in () if devices.trace is None else _rows(devices.trace, data):
            if "start" in row:
                start, end = row.pop("start"), row.pop("end")
                check_number(f"{where}end", end, start)
                insort(self._spans.setdefault(client, []), (start, end))
            elif client in self._table:
                raise ConfigurationError(f"{where}the client has an earlier row; leave one of them out")
            self._table[client] = row
        missing = [client for client in data.participating if devices.trace is not None and client not in self._table]
        if missing:
            raise ConfigurationError(
                f"{devices.trace} has no row for {len(missing)} of {len(data.participating)} clients, such as client "
                f"{missing[0]}: give each client one; a client that is never there has start 0 and end 0"
            )
        self._period = max((end for spans in self._spans.values() for _, end in spans), default=0.0) or math.inf

    def seed_of_further(self, round: int) -> int:
        """Seed of the draw of clients that are asked in the places of others."""
        return derive_seed(self._seed, Purpose.DEVICES, 3, round)

    def _uniform(self, *parts: int) -> float:
        return (derive_seed(self._seed, Purpose.DEVICES, *parts) + 0.5) / 2**63

    def _value(self, name: str, client: int) -> float:
        return float(self._table.get(client, {}).get(name, getattr(self.devices, name)))

    def is_there(self, client: int, round: int, clock: float) -> bool:
        """Whether a client is there when a round begins.

        Args:
            client: Number of the client.
            round: Number of the round, from 0.
            clock: Simulated seconds of the run.
        """
        daily = 1 + self.devices.diurnal * math.cos(2 * math.pi * clock / self.devices.day)
        chance = self._value("availability", client) * daily
        return self._uniform(1, round, client) < chance and self._stays(client, clock) > 0

    def _stays(self, client: int, clock: float) -> float:
        """For how long a client is still there; 0 where it is not."""
        if not self._spans:
            return math.inf
        spans, now = self._spans[client], clock % self._period
        place = bisect_right(spans, (now, math.inf)) - 1
        return max(0.0, spans[place][1] - now) if place >= 0 else 0.0

    def drops_out(self, client: int, round: int) -> bool:
        """Whether a client drops out of a round in which it is there."""
        return self._uniform(2, round, client) < self._value("dropout", client)

    def pace(self, client: int, clock: float) -> Pace:
        """How a client does."""
        seconds = self._value("seconds_per_step", client)
        if self.devices.spread and "seconds_per_step" not in self._table.get(client, {}):
            seconds *= math.exp(self.devices.spread * NormalDist().inv_cdf(self._uniform(0, client)))
        return Pace(seconds, self._value("transfer_seconds", client), self._stays(client, clock))


def _rows(path: str, data: Any) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Place, client and numbers of each row; see :class:`Fleet`."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            found = [*(reader.fieldnames or ())]
            for column in found:
                check_choice(f"{path}: a column", column, ("client", *COLUMNS, *SPAN))
            if "client" not in found or len({*SPAN}.intersection(found)) == 1:
                raise ConfigurationError(f"{path} has the columns {found}, expected client, and both {SPAN} or neither")
            for row in reader:
                name = str(row.pop("client")).strip()
                where = f"{path}, line {reader.line_num}, client {name}: "
                client = client_number(data, name)
                yield where, client, {column: _checked(column, text, where) for column, text in row.items()}
    except NoSuchClientError as error:
        raise ConfigurationError(f"{where}{error}; leave the row out, or correct it") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; give a CSV file with a column client") from error
