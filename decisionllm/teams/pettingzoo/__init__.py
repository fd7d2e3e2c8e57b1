"""PettingZoo: environments to evaluate in, and logs of them."""
