"""simple_spread and simple_tag of MPE: teams that cover landmarks, and one that is hunted."""
