"""BabyAI: missions in words in MiniGrid's rooms, and the bot that shows how to do them."""
