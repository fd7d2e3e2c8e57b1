"""Training objectives, one file each; see `protocols.Objective`."""
