"""Small options of the registered datasets and environments of bidding, for the tests of contracts."""

SHORT_DAY = {"periods": "3", "positions": "0,9", "opportunities": 2000}


def journal(folder):
    """The journal of one campaign that a server answered for a day."""
    from tests.bidding.test_journal_dataset import serve

    serve(folder / "j.sqlite", positions="0")
    return {"path": str(folder / "j.sqlite")}


DATASETS = {"auction": {"periods": "3"}, "journal": journal}
ENVS = {"auction": SHORT_DAY, "journal": SHORT_DAY}
ELSEWHERE = {"dataset": {}, "env": {}}
