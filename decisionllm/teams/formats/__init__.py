"""File formats of other projects and of our own: no learning."""
