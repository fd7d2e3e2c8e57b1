"""The datasets, environments and models of teams, see `decisionllm.choices`."""

TEXT = {"text": "${text}"}
TEXTS = {"text": "${text}", "frames": "${text_wordings}"}

CHOICES = {
    "dataset": {
        "team": {"_target_": "decisionllm.teams.dataset.load", **TEXT},
        "team_imagined": {"_target_": "decisionllm.teams.imagined.load", **TEXT},
        "smax": {"_target_": "decisionllm.teams.smax.dataset.load", **TEXT},
        "spread": {"_target_": "decisionllm.teams.spread.dataset.load", **TEXT},
        "tmaze": {"_target_": "decisionllm.teams.tmaze.dataset.load", **TEXT},
    },
    "env": {
        "pettingzoo": {
            "_target_": "decisionllm.teams.pettingzoo.PettingZooTeams",
            "path": "${oc.select:dataset.path,''}",
            "meta": "${oc.select:dataset.meta,''}",
            "team": "${oc.select:dataset.team,0}",
            "returns": "${oc.select:dataset.returns,''}",
            "capacity": "${oc.select:dataset.capacity,6}",
            **TEXTS,
        },
        "smax": {
            "_target_": "decisionllm.teams.smax.env.SmaxTeams",
            "map": "${dataset.map}",
            **TEXTS,
        },
        "spread": {
            "_target_": "decisionllm.teams.spread.env.SpreadTeams",
            "agents": "${dataset.agents}",
            "actions": "${dataset.actions}",
            "capacity": "${dataset.capacity}",
            **TEXTS,
        },
        "tmaze": {
            "_target_": "decisionllm.teams.tmaze.env.TMazeTeams",
            "agents": "${dataset.agents}",
            "length": "${dataset.length}",
            **TEXTS,
        },
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "model": {
        "joint": {"_target_": "decisionllm.teams.model.TeamSequenceModel"},
        "both": {"_target_": "decisionllm.teams.model.TeamSequenceModel"},
    },
    "sampler": {
        "joint": {"_target_": "decisionllm.teams.windows.sample_teams"},
        "both": {"_target_": "decisionllm.teams.windows.sample_teams_and_agents"},
    },
    "partner": {
        "tag-chase": {"_target_": "decisionllm.teams.spread.tag.chase"},
        "tag-flee": {"_target_": "decisionllm.teams.spread.tag.flee"},
    },
    "env_imports": {
        "pettingzoo": {"_target_": "decisionllm.teams.partners.pettingzoo_imports"},
    },
    "export": {
        "team": {"_target_": "decisionllm.teams.dataset.save"},
    },
    "summary": {
        "agents": {"_target_": "decisionllm.teams.summary.summarise_agents"},
    },
}
