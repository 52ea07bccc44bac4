"""Choose the length of a shortlist by conformal calibration, diversify it, and measure distance from training data."""
