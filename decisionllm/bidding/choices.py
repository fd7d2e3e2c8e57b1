"""The datasets and environments of auctions, see `decisionllm.choices`."""

OF_DATASET = {
    "observation": "${dataset.observation}",
    "context_features": "${dataset.context_features}",
    "reward": "${dataset.reward}",
}

CHOICES = {
    "dataset": {
        "auction": dict(_target_="decisionllm.bidding.dataset.load", text="${text}"),
        "journal": dict(_target_="decisionllm.bidding.journal_dataset.load", text="${text}"),
    },
    "env": {
        "journal": dict(_target_="decisionllm.bidding.env.Auction", text="${text}", **OF_DATASET),
        "auction": dict(
            _target_="decisionllm.bidding.env.Auction",
            text="${text}",
            frames="${text_wordings}",
            **OF_DATASET,
        ),
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "raw_export": {
        "replay": dict(_target_="decisionllm.bidding.dataset.export_days"),
    },
    "export": {
        "trajectories": dict(_target_="decisionllm.bidding.dataset.save"),
    },
}
