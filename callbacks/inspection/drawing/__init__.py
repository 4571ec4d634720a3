"""Figures, and where they go."""
