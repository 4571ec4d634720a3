"""Runs of the command line: their folders and configs, how they stop and go on."""
