"""Published data sets and image folders."""
