"""Runs of a study: started as processes on this machine or on a Ray cluster, watched, and found in their folders."""
