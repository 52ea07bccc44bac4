"""Timing of one launch or of several side by side, a device's measured rates, and partitions of a device."""
