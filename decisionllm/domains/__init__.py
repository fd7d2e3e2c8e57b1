"""Worlds, one folder each: simulator, dataset, environment with its score, players, task texts."""
