"""How long the runs of a study take: measured by earlier calls, or by a round of each row before the study starts."""
