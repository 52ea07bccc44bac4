"""The dense product as an op: what it may be given, the choice of a config, and gradients."""
