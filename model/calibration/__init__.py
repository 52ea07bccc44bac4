"""How many configs to try, and which: what a ranker's figures are worth on models that it never saw, and how
far a problem is from what was measured."""
