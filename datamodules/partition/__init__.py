"""Partition rules, which assign the samples of a data set to clients, and files and figures of partitions.

Every rule is a :class:`Partitioner` with ``partition(labels) -> list of index arrays``, a pure function of (labels,
arguments, seed).
"""
