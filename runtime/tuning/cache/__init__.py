"""Store measured times and chosen configs on disk for later processes, export them, and write them as Python code."""
