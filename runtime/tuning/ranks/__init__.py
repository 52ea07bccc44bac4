"""Make all ranks of a job choose the same config."""
