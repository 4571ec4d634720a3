"""Projects made of packages that pip installs, by kind."""

from _helpers.foreign import (
    anomalies,
    chemistry,
    demos,
    earth,
    forecasting,
    generation,
    graphs,
    self_supervised,
    tables,
    text,
    vision,
)
from _helpers.foreign.project import Project

KINDS = (demos, text, vision, generation, self_supervised, graphs, forecasting, chemistry, tables, anomalies, earth)
PROJECTS: list[Project] = [project for kind in KINDS for project in kind.PROJECTS]
