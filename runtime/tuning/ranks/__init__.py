"""Choose the same config on all ranks of a job."""
