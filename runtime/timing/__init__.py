"""Timing: one launch, several side by side, a first call, and what a device and parts of it reach."""
