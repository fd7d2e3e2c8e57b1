"""The datasets, environments and models of teams, see `decisionllm.choices`."""

TEXT = {"text": "${text}"}
TEXTS = {"text": "${text}", "frames": "${text_wordings}"}

CHOICES = {
    "dataset": {
        "team": dict(_target_="decisionllm.teams.dataset.load", **TEXT),
        "team_imagined": dict(_target_="decisionllm.teams.imagined.load", **TEXT),
        "smax": dict(_target_="decisionllm.teams.smax.dataset.load", **TEXT),
        "spread": dict(_target_="decisionllm.teams.spread.dataset.load", **TEXT),
        "tmaze": dict(_target_="decisionllm.teams.tmaze.dataset.load", **TEXT),
    },
    "env": {
        "pettingzoo": dict(
            _target_="decisionllm.teams.pettingzoo.env.PettingZooTeams",
            path="${oc.select:dataset.path,''}",
            meta="${oc.select:dataset.meta,''}",
            team="${oc.select:dataset.team,0}",
            returns="${oc.select:dataset.returns,''}",
            capacity="${oc.select:dataset.capacity,6}",
            **TEXTS,
        ),
        "smax": dict(
            _target_="decisionllm.teams.smax.env.SmaxTeams", map="${dataset.map}", **TEXTS
        ),
        "spread": dict(
            _target_="decisionllm.teams.spread.env.SpreadTeams",
            agents="${dataset.agents}",
            actions="${dataset.actions}",
            capacity="${dataset.capacity}",
            **TEXTS,
        ),
        "tmaze": dict(
            _target_="decisionllm.teams.tmaze.env.TMazeTeams",
            agents="${dataset.agents}",
            length="${dataset.length}",
            **TEXTS,
        ),
    },
    # functions that the package looks up by name, see `registry.FUNCTIONS`
    "model": {
        "joint": dict(_target_="decisionllm.teams.model.TeamSequenceModel"),
        "both": dict(_target_="decisionllm.teams.model.TeamSequenceModel"),
    },
    "sampler": {
        "joint": dict(_target_="decisionllm.teams.windows.sample_teams"),
        "both": dict(_target_="decisionllm.teams.windows.sample_teams_and_agents"),
    },
    "partner": {
        "tag-chase": dict(_target_="decisionllm.teams.spread.tag.chase"),
        "tag-flee": dict(_target_="decisionllm.teams.spread.tag.flee"),
    },
    "env_imports": {
        "pettingzoo": dict(_target_="decisionllm.teams.pettingzoo.partners.pettingzoo_imports"),
    },
    "export": {
        "team": dict(_target_="decisionllm.teams.dataset.save"),
    },
    "summary": {
        "agents": dict(_target_="decisionllm.teams.summary.summarise_agents"),
    },
}
