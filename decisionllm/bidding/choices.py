"""The datasets and environments of auctions, see `decisionllm.choices`."""

OF_DATASET = {
    "observation": "${dataset.observation}",
    "context_features": "${dataset.context_features}",
    "reward": "${dataset.reward}",
}

CHOICES = {
    "dataset": {
        "auction": {"_target_": "decisionllm.bidding.dataset.load", "text": "${text}"},
        "journal": {"_target_": "decisionllm.bidding.journal_dataset.load", "text": "${text}"},
    },
    "env": {
        "journal": {
            "_target_": "decisionllm.bidding.env.Auction",
            "text": "${text}",
            **OF_DATASET,
        },
        "auction": {
            "_target_": "decisionllm.bidding.env.Auction",
            "text": "${text}",
            "frames": "${text_wordings}",
            **OF_DATASET,
        },
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "raw_export": {
        "replay": {"_target_": "decisionllm.bidding.dataset.export_days"},
    },
    "export": {
        "trajectories": {"_target_": "decisionllm.bidding.dataset.save"},
    },
}
