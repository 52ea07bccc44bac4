"""Ranking: features in, predicted slowdowns out; the bundle that carries it; the evaluation that judges it."""
