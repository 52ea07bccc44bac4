"""Collection: wide config spaces measured on real GPUs."""
