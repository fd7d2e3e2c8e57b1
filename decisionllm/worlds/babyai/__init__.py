"""BabyAI: small rooms of balls, boxes, keys and doors, with a mission in words."""
