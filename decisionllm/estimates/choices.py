"""The estimators that `decisionllm compare estimators=[NAME]` takes, see `decisionllm.choices`."""

CHOICES = {
    "estimator": {
        "fqe": {"_target_": "decisionllm.estimates.fitted_q.FittedQ"},
        "importance": {"_target_": "decisionllm.estimates.importance.Importance"},
        "model": {"_target_": "decisionllm.estimates.learned_model.LearnedModel"},
    },
}
