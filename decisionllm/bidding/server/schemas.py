"""Bodies of requests and answers as pydantic models: the OpenAPI document, and errors that name the
wrong field.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from decisionllm.bidding.market.observation import MIN_REMAINING
from decisionllm.schema import Json

LARGE = 1e12  # largest magnitude of a number
STEPS = 10_000  # longest history
OPPORTUNITIES = 500_000  # most of a step, see `direct.MAX_MARKS`
Number = Annotated[float, Field(ge=-LARGE, le=LARGE)]
# A list ends at its first fault: an error of each item of a long one would stop the event loop for
# seconds.
Row = Annotated[list[Number], Field(max_length=10_000, fail_fast=True)]
Guard = Literal["negative", "bid cap", "remaining", "pacing", "budget spent"]
Probability = Annotated[float, Field(ge=0, le=1, description="probability")]
# probabilities, prices, slots and flags of AuctionNet: none is below 0
Positive = Annotated[float, Field(ge=0, le=LARGE)]
# a number of each opportunity of a step
Each = Annotated[list[Positive], Field(max_length=OPPORTUNITIES, fail_fast=True)]
EachRow = Annotated[
    list[Annotated[list[Positive], Field(max_length=3, fail_fast=True)]],
    Field(max_length=OPPORTUNITIES, fail_fast=True),
]
# the same of several steps
Steps = Annotated[list[Each], Field(fail_fast=True)]
StepRows = Annotated[list[EachRow], Field(fail_fast=True)]
# 48.0 is one
JSON_INTEGER = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
Whole = Annotated[int, JSON_INTEGER]
Mask = Annotated[list[bool], Field(fail_fast=True)]
Id = Annotated[str, Field(max_length=64)]


def number(description: str, low: float = -LARGE, high: float = LARGE, **more: Any) -> Any:
    return Field(description=description, ge=low, le=high, **more)


def examples(*bodies: Json) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(bodies)})


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class ActRequest(Body):
    """A history: all observations up to now, and the actions and rewards before."""

    model_config = examples(
        {"observations": [[1.0, 0.9, 0.0005, 9800, 0, 8.0, 90.0]], "actions": [], "rewards": []}
    )
    observations: Annotated[
        list[Row],
        Field(min_length=1, max_length=STEPS, fail_fast=True, description="(t + 1) x S, raw units"),
    ]
    actions: Annotated[
        list[Row], Field(max_length=STEPS, fail_fast=True, description="t x A, raw units")
    ]
    rewards: Annotated[list[Number], Field(max_length=STEPS, fail_fast=True, description="t")]
    target_return: float | None = number(
        "to condition on, raw reward units; none: the run's own", default=None
    )
    text: str = Field("", max_length=2000, description="task text")
    action_masks: (
        Annotated[list[Mask], Field(max_length=STEPS, fail_fast=True, description="(t + 1) x C")]
        | None
    ) = None


class ActAnswer(BaseModel):
    action: list[float]
    return_to_go: float | None = Field(
        description="that the action is conditioned on, raw reward units"
    )


class CampaignSettings(Body):
    """A new campaign."""

    model_config = examples(
        {"budget": 2900, "target_cpa": 100, "category": 0, "name": "shoes", "key": "shoes-1"}
    )
    budget: float = number("currency of the training log, for the whole campaign", MIN_REMAINING)
    target_cpa: float = number("currency of the training log per conversion", 1e-6)
    category: Whole = Field(
        0, ge=0, le=1000, description="of the advertised product, as in the log"
    )
    horizon: Whole = Field(48, ge=1, le=STEPS, description="steps")
    text: str | None = Field(
        None, max_length=2000, description="task text; none: from the policy's text template"
    )
    name: str | None = Field(None, max_length=200)
    target_return: float | None = number(
        "to condition on, in the reward units of training", default=None
    )
    bid_cap: float | None = number("currency, for one opportunity", 1e-9, default=None)
    key: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="requests with the same key open one campaign",
    )


class Coming(Body):
    """Opportunities of a step."""

    value: float = number("mean predicted conversion probability", 0, 1)
    volume: float = number("opportunities", 0)


class Result(Coming):
    """Result of a step: means over its opportunities, their number, and totals."""

    bid: float = number("currency, mean bid for an opportunity", 0)
    market_price: float = number("currency, mean of the least bids that would have won", 0)
    conversion: float = number("conversions / opportunities", 0, 1)
    won: float = number("share of the opportunities", 0, 1)
    spend: float = number("currency, of the step alone", 0)
    conversions: float = number("counted, of the step alone", 0)
    exposed_value: float = number("sum of the values of exposed ads", 0)


class Tick(Body):
    """Sent before each step, and once after the last, without `coming`, to report its result."""

    model_config = examples(
        {
            "index": 0,
            "key": "shoes-1-0",
            "result": None,
            "coming": {"value": 0.0005, "volume": 9800},
        },
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
    )
    index: Whole = Field(ge=0, le=STEPS, description="of the step, from 0")
    key: str = Field(
        "", max_length=200, description="of the request; a repeated request has the same"
    )
    result: Result | None = Field(None, description="of the step before; none before the first")
    coming: Coming | None = Field(
        None, description="opportunities of the step; none: the campaign ends"
    )


class Ticks(Body):
    """Ticks of several campaigns in one request."""

    model_config = examples(
        {"ticks": {"64dc3ecec01eb84e": {"index": 0, "coming": {"value": 0.0005, "volume": 9800}}}}
    )
    ticks: dict[Id, Tick] = Field(min_length=1, max_length=1000, description="by campaign id")


class AuctionNetBidding(Body):
    """Arguments of AuctionNet's `bidding(...)`; the histories hold every step so far, or only the
    last one.
    """

    model_config = examples(
        {
            "campaign": "64dc3ecec01eb84e",
            "timeStepIndex": 1,
            "pValues": [0.0005, 0.0007],
            "historyPValueInfo": [[[0.0004, 0.0001], [0.0006, 0.0001]]],
            "historyBid": [[0.04, 0.06]],
            "historyAuctionResult": [[[1, 1, 0.03], [0, 0, 0]]],
            "historyImpressionResult": [[[1, 0], [0, 0]]],
            "historyLeastWinningCost": [[0.03, 0.08]],
        },
    )
    campaign: Id = Field(description="id of an open campaign")
    timeStepIndex: Whole = Field(ge=0, le=STEPS)
    pValues: Annotated[list[Probability], Field(max_length=OPPORTUNITIES, fail_fast=True)]
    pValueSigmas: Each | None = Field(None, description="not used")
    historyPValueInfo: StepRows = []
    historyBid: Steps = []
    historyAuctionResult: StepRows = []
    historyImpressionResult: StepRows = []
    historyLeastWinningCost: Steps = []


class TakeOver(Body):
    """Another run that opens new campaigns from now on."""

    model_config = examples({"run": "nano-1"}, {"run": "nano-1", "share": 0.1, "campaigns": "keep"})
    run: str = Field(min_length=1, max_length=500, description="its name in the folder of models")
    share: float = Field(
        1.0, gt=0, le=1, description="of the new campaigns; the others keep their proportions"
    )
    campaigns: Literal["keep", "move"] = Field(
        "keep",
        description=(
            "open campaigns of models without a share: they keep their model, or go on with those "
            "that have one"
        ),
    )


class Rollback(Body):
    """Back to the models and shares before the last change."""

    model_config = examples({})
    campaigns: Literal["keep", "move"] = Field(
        "move", description="open campaigns of models that have no share any more"
    )


class ServedModel(BaseModel):
    model: str
    run: str
    share: float = Field(description="of the new campaigns")
    open: int = Field(description="its campaigns that have not ended")


class ServedModels(BaseModel):
    models: list[ServedModel]
    before: dict[str, float] | None = Field(description="shares that a rollback goes back to")
    checked: int | None = Field(None, description="ticks of the journal that the new model decided")
    moved: int | None = Field(None, description="campaigns that changed their model")


class Decision(BaseModel):
    multiplier: float = Field(description="currency per conversion")
    return_to_go: float | None = Field(
        description="that the policy conditioned on, in the reward units of training"
    )
    guards: list[Guard] = Field(description="limits that lowered the multiplier")


class TickSummary(Decision):
    index: int
    fallback: Literal["model", "deadline"] | None = Field(
        description="why linear pacing answered instead of the policy"
    )
    spend: float = Field(description="currency, before this step")
    conversions: float = Field(description="before this step")


class CampaignTick(TickSummary):
    model: str | None = Field(None, description="that answered")
    shadow: Decision | None = Field(
        None, description="of the shadow policy; none: there is none, or it was dropped or failed"
    )


class TickAnswer(TickSummary):
    """Bid multiplier x value for each opportunity, at most max_bid."""

    remaining: float = Field(description="currency")
    max_bid: float = Field(description="currency, for one opportunity")
    model: str


class BiddingAnswer(TickAnswer):
    bids: list[float] = Field(description="currency, one per opportunity")


class Campaign(BaseModel):
    id: str
    name: str | None
    status: Literal["open", "ended"]
    step: int = Field(description="to be decided next")
    horizon: int = Field(description="steps")
    budget: float = Field(description="currency")
    spend: float = Field(description="currency, so far")
    target_cpa: float = Field(description="currency per conversion")
    conversions: float = Field(description="so far")
    category: int
    text: str = Field(description="task text")
    target_return: float | None = Field(
        description="to condition on, in the reward units of training"
    )
    bid_cap: float | None = Field(description="currency, for one opportunity")
    model: str | None = Field(description="that answers the campaign")


class CampaignWithTicks(Campaign):
    ticks: list[CampaignTick]


class Campaigns(BaseModel):
    campaigns: list[Campaign]
    more: bool = Field(description="whether there are older ones, not listed or not searched")
    older: str | None = Field(description="`before` of the request that goes on with older ones")
    open: int = Field(description="campaigns of the journal that have not ended")


class Fault(BaseModel):
    loc: list[str | int]
    msg: str
    type: str


class Error(BaseModel):
    """The reason why a request was refused, and the field that is wrong."""

    detail: list[Fault]
    expected: int | None = Field(
        None, description="the expected tick index, if the tick was out of order"
    )
