"""The guard around kernel families, which third parties write."""
