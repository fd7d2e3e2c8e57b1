"""The estimators that `decisionllm compare estimators=[NAME]` takes, see `decisionllm.choices`."""

CHOICES = {
    "estimator": {
        "fqe": dict(_target_="decisionllm.estimates.fitted_q.FittedQ"),
        "importance": dict(_target_="decisionllm.estimates.importance.Importance"),
        "model": dict(_target_="decisionllm.estimates.learned_model.LearnedModel"),
    },
}
