"""The clients' splits of the data, their batches, their views and their normalization."""
