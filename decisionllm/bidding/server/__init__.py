"""A policy over HTTP: routes, campaigns, cache, batches, OpenRTB."""
