"""What a model is trained to minimise, one file each; see `protocols.Objective`."""
