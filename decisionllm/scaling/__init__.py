"""Scaling studies: grid, workers, law, report."""
