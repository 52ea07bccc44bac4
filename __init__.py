"""Foretune: know the fast configs before you tune."""
