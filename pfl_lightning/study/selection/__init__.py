"""Which runs of a study a command means: the part it names, and runs whose options or rows have changed since."""
