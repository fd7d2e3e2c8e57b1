"""Estimates of a policy's return from a log alone: one file for each estimator."""
