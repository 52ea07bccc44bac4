"""Shortlists at run time: prune callbacks and timing."""
