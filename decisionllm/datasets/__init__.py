"""Readers of datasets, one per source, the data store, and the windows that are trained on."""
