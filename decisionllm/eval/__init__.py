"""Rollouts, scores and the report; one file per environment."""
