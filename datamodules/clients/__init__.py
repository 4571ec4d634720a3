"""Each client's part and view of the data."""
