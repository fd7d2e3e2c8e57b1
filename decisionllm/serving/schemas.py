"""The bodies of requests and answers, as pydantic models: what OpenAPI says, and what is refused with the name of the field."""

from functools import cache
from types import SimpleNamespace
from typing import Annotated, Literal

LARGE = 1e12  # beyond this no number is meant
STEPS = 10_000  # of a history


@cache
def models():
    """The models by their names."""
    from pydantic import BaseModel, ConfigDict, Field

    def number(about, low=-LARGE, high=LARGE, **more):
        return Annotated[float, Field(description=about, ge=low, le=high, **more)]

    Name = Annotated[str, Field(max_length=200)]
    Any_ = Annotated[float, Field(ge=-LARGE, le=LARGE)]
    Row = Annotated[list[Any_], Field(max_length=10_000)]

    class Body(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    class Act(Body):
        """Everything seen so far, now included, and what was done and got before."""

        model_config = ConfigDict(
            json_schema_extra={
                "examples": [{"observations": [[1.0, 0.9, 0.0005, 9800, 0, 8.0, 90.0]], "actions": [], "rewards": []}]
            }
        )
        observations: Annotated[list[Row], Field(min_length=1, max_length=STEPS, description="(t + 1) x S, raw units")]
        actions: Annotated[list[Row], Field(max_length=STEPS, description="t x A, raw units")]
        rewards: Annotated[list[Any_], Field(max_length=STEPS, description="t")]
        target_return: number("what is asked for, raw reward units; none: the run's own") | None = None
        text: Annotated[str, Field(max_length=2000, description="the task in words")] = ""
        action_masks: Annotated[list[list[bool]], Field(max_length=STEPS, description="(t + 1) x C")] | None = None

    class Action(BaseModel):
        action: list[float]
        return_to_go: float | None = Field(description="what was asked for now, raw reward units")

    class Open(Body):
        """A campaign that begins."""

        model_config = ConfigDict(
            json_schema_extra={
                "examples": [
                    {"budget": 2900, "target_cpa": 100, "category": 0, "horizon": 48, "name": "shoes", "key": "shoes-1"}
                ]
            }
        )
        budget: number("currency", 0.01)
        target_cpa: number("currency a conversion", 1e-6)
        category: Annotated[int, Field(ge=0, le=1000)] = 0
        horizon: Annotated[int, Field(ge=1, le=STEPS, description="steps")] = 48
        text: Annotated[str, Field(max_length=2000)] | None = None
        name: Name | None = None
        target_return: number("what is asked for, in the rewards that the policy was trained on") | None = None
        bid_cap: number("currency, for one opportunity", 1e-9) | None = None
        key: (
            Annotated[str, Field(min_length=1, max_length=200, description="of two requests with it, one opens a campaign")]
            | None
        ) = None

    class Result(Body):
        """What a step brought: means over its opportunities, their number, and totals."""

        bid: number("currency, mean", 0)
        market_price: number("currency, mean of the least bids that would have won", 0)
        value: number("mean predicted conversion probability", 0, 1)
        conversion: number("conversions / opportunities", 0, 1)
        won: number("share of the opportunities", 0, 1)
        volume: number("opportunities", 0)
        spend: number("currency", 0)
        conversions: number("counted", 0)
        exposed_value: number("sum of the values of what was shown", 0)

    class Coming(Body):
        value: number("mean predicted conversion probability", 0, 1)
        volume: number("opportunities", 0)

    class Tick(Body):
        """Asked before each step, and once after the last, without `coming`, to say what it brought."""

        model_config = ConfigDict(
            json_schema_extra={
                "examples": [
                    {"index": 0, "key": "shoes-1-0", "result": None, "coming": {"value": 0.0005, "volume": 9800}},
                    {
                        "index": 1,
                        "key": "shoes-1-1",
                        "coming": {"value": 0.0006, "volume": 9100},
                        "result": {
                            "bid": 0.05,
                            "market_price": 0.09,
                            "value": 0.0005,
                            "conversion": 0.0001,
                            "won": 0.02,
                            "volume": 9800,
                            "spend": 41.5,
                            "conversions": 1,
                            "exposed_value": 0.6,
                        },
                    },
                ]  # fmt: skip
            }
        )
        index: Annotated[int, Field(ge=0, le=STEPS, description="of the step, from 0")]
        key: Annotated[str, Field(max_length=200, description="of the request: who repeats it sends the same")] = ""
        result: Result | None = Field(None, description="of the step before; none before the first")
        coming: Coming | None = Field(None, description="opportunities of the step; none: the campaign ends")

    class Many(Body):
        """Ticks of several campaigns in one request."""

        model_config = ConfigDict(
            json_schema_extra={
                "examples": [{"ticks": {"64dc3ecec01eb84e": {"index": 0, "coming": {"value": 0.0005, "volume": 9800}}}}]
            }
        )
        ticks: Annotated[dict[str, Tick], Field(min_length=1, max_length=1000, description="by the ids of their campaigns")]

    class Bid(Body):
        """AuctionNet's `bidding(...)`: histories hold every step so far, or the last one alone."""

        model_config = ConfigDict(
            json_schema_extra={
                "examples": [
                    {
                        "campaign": "64dc3ecec01eb84e",
                        "timeStepIndex": 1,
                        "pValues": [0.0005, 0.0007],
                        "historyPValueInfo": [[[0.0004, 0.0001], [0.0006, 0.0001]]],
                        "historyBid": [[0.04, 0.06]],
                        "historyAuctionResult": [[[1, 1, 0.03], [0, 0, 0]]],
                        "historyImpressionResult": [[[1, 0], [0, 0]]],
                        "historyLeastWinningCost": [[0.03, 0.08]],
                    }
                ]  # fmt: skip
            }
        )
        campaign: Annotated[str, Field(max_length=64, description="id of an open one")]
        timeStepIndex: Annotated[int, Field(ge=0, le=STEPS)]
        pValues: Annotated[list[number("probability", 0, 1)], Field(max_length=1_000_000)]
        pValueSigmas: Row | None = Field(None, description="not used")
        historyPValueInfo: list[list[Row]] = []
        historyBid: list[Row] = []
        historyAuctionResult: list[list[Row]] = []
        historyImpressionResult: list[list[Row]] = []
        historyLeastWinningCost: list[Row] = []

    class Answer(BaseModel):
        """What to bid: multiplier x value for each opportunity, none above max_bid."""

        index: int
        multiplier: float = Field(description="currency a conversion")
        return_to_go: float | None = Field(description="what the policy was asked for")
        guards: list[Literal["negative", "bid cap", "remaining", "pacing", "budget spent"]] = Field(
            description="what held it back"
        )
        fallback: Literal["model", "deadline"] | None = Field(description="why linear pacing answered in the policy's place")
        remaining: float = Field(description="currency")
        spend: float = Field(description="currency, before this step")
        conversions: float = Field(description="before this step")
        max_bid: float = Field(description="currency, for one opportunity")
        model: str

    class Bids(Answer):
        bids: list[float] = Field(description="currency, one an opportunity")

    class Campaign(BaseModel):
        id: str
        name: str | None
        status: Literal["open", "ended"]
        step: int = Field(description="that is to be asked about next")
        horizon: int
        budget: float
        spend: float
        target_cpa: float
        conversions: float
        category: int
        text: str
        target_return: float | None
        bid_cap: float | None

    class Shown(BaseModel):
        index: int
        multiplier: float
        return_to_go: float | None
        spend: float
        conversions: float
        fallback: str | None
        guards: list[str]

    class Whole(Campaign):
        ticks: list[Shown]

    class Campaigns(BaseModel):
        campaigns: list[Campaign]

    class Where(BaseModel):
        loc: list[str | int]
        msg: str
        type: str

    class Error(BaseModel):
        """Why a request was refused, and which field is at fault."""

        detail: list[Where]
        expected: int | None = Field(None, description="the index that is expected, where it was out of order")

    return SimpleNamespace(**{name: model for name, model in locals().items() if isinstance(model, type)})
