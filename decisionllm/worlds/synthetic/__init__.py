"""Points that walk to a goal: made in seconds, for first tries and tests."""
