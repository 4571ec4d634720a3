"""Augmentation of whole batches."""
