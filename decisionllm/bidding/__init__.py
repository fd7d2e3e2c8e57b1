"""The advertising market, campaigns, what a policy observes of them, and the journal."""
