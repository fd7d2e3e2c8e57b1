"""Sentences that a report begins with: which policy is the best, and by how much."""

import math
from collections.abc import Sequence

from decisionllm.eval.pictures import group_by
from decisionllm.schema import Json

Row = Json


def format_number(x: float) -> str:
    """Format a number with one digit after the point; one below 1, of which that leaves little, with
    three significant digits.
    """
    return f"{x:.1f}" if abs(x) >= 1 or x == 0 else f"{x:.3g}"


def format_interval(low: float, high: float) -> str:
    """Format an interval, "57.0 .. 67.0"."""
    return f"{format_number(low)} .. {format_number(high)}"


def difference_interval(first: Row, second: Row) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent mean scores: (low, high).

    The distances from each mean to its own bounds are added in squares. Source: Zou and Donner,
    Construction of confidence limits about effect measures (2008), equation 2.
    """
    difference = first["score"] - second["score"]
    below = math.hypot(first["score"] - first["low"], second["high"] - second["score"])
    above = math.hypot(first["high"] - first["score"], second["score"] - second["low"])
    return difference - below, difference + above


def conclusions(results: Sequence[Row], scripted: set[tuple[str, str]]) -> list[str]:
    """Return a sentence for each world: its best policy beside the second one and scripted players.

    Policies of several protocols are compared with each other where each has one protocol, such as
    one with a text and one without; otherwise each protocol has a sentence.

    Args:
        results: see `report.summarise`, the best first; headline targets alone are compared.
        scripted: (world, policy) of the scripted players.
    """
    lines = []
    headlines = [result for result in results if result["headline"]]
    for world, members in group_by(headlines, "world").items():
        players = [each for each in members if (world, each["policy"]) in scripted]
        policies = [each for each in members if (world, each["policy"]) not in scripted]
        beside = describe_players(players)
        for label, contenders in group_contenders(world, policies).items():
            lines.append(f"{label}: {compare_best(contenders)}{beside}")
    return lines


def group_contenders(world: str, policies: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Return the policies of a world that are compared with each other, by the label of each group,
    see `conclusions`.
    """
    by_protocol = group_by(policies, "protocol")
    if len(by_protocol) > 1 and len(group_by(policies, "policy")) == len(policies):
        named = []
        for each in policies:
            named.append(each | {"policy": f"{each['policy']} ({each['protocol']})"})
        return {world: named}
    return {f"{world}, {name}": each for name, each in by_protocol.items()}


def describe_players(players: Sequence[Row]) -> str:
    """Return a sentence with the scores of scripted players; empty without any."""
    scores = [f"{each['policy']} {format_number(each['score'])}" for each in players]
    return f" Scripted players: {', '.join(scores)}." if scores else ""


def compare_best(contenders: Sequence[Row]) -> str:
    """Return a sentence about the best of these results and the second one, if there is one."""
    best = contenders[0]
    score = format_number(best["score"])
    if len(contenders) == 1:
        return f"{best['policy']} scores {score} ({format_interval(best['low'], best['high'])})."
    second = contenders[1]
    low, high = difference_interval(best, second)
    lead = format_number(best["score"] - second["score"])
    interval = f"{lead} ({format_interval(low, high)})"
    comparison = f"is not clearly better than {second['policy']}, with a lead of {interval}"
    if low > 0:
        comparison = f"beats {second['policy']} by {interval}"
    return f"{best['policy']} {comparison}: {score} against {format_number(second['score'])}" + (
        f", the best of {len(contenders)} policies." if len(contenders) > 2 else "."
    )
