"""Figures and charts, and their output to loggers and files."""
