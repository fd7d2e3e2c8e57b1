"""Numbers and text to tokens."""
