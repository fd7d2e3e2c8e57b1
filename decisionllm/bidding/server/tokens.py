"""Tokens with names, rights and rate limits, from a TOML file:

    [bidder]
    token = "at least sixteen letters"
    rights = ["bid", "read"]
    rate = 500

The file may hold `sha256`, the digest of a token in hexadecimal, in place of the token.
"""

import hmac
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from decisionllm.bidding.server.rate_limit import TokenBucket

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
RIGHTS = ("bid", "operate", "read")
FIELDS = ("token", "sha256", "rights", "rate", "burst")
SHORTEST, LONGEST = 16, 256  # bytes of a token in a file
MAX_TOKENS = 100  # tokens of a file: a request is compared with each
BURST_S = 2.0  # seconds of the rate that a burst holds, unless the file says more


@dataclass
class Caller:
    """The sender of a request.

    Attributes:
        name: of the token in the file; empty: the token is not from a file.
    """

    name: str = ""
    rights: frozenset[str] = frozenset(RIGHTS)
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(math.inf, math.inf))


class Tokens:
    """The callers of a server by the digests of their tokens.

    Args:
        single: a token with all rights and without a limit.
    """

    def __init__(self, single: str | None = None) -> None:
        self.single: list[tuple[bytes, Caller]] = []
        if single:
            self.single = [(sha256(single.encode()).digest(), Caller())]
        self.longest = max(LONGEST, len((single or "").encode()))  # bytes
        self.callers = self.single  # replaced as a whole, so that a request sees one state

    def load(self, content: bytes) -> None:
        """Replace the tokens of the file by these. A caller of the same name, rate and burst keeps
        its used part of the limit.

        Raises:
            ValueError: the content is no file of tokens; nothing is replaced.
        """
        before = {caller.name: caller for _, caller in self.callers}
        read = parse_tokens(content)
        for _, caller in read:
            bucket = before.get(caller.name, caller).bucket
            if (bucket.rate, bucket.burst) == (caller.bucket.rate, caller.bucket.burst):
                caller.bucket = bucket
        self.callers = self.single + read

    def find(self, token: bytes) -> Caller | None:
        """The caller with this token. The time taken depends on no byte of a known token."""
        if len(token) > self.longest:
            return None  # without the cost of its digest
        digest = sha256(token).digest()
        matching = None
        for known_digest, caller in self.callers:
            if hmac.compare_digest(known_digest, digest):
                matching = caller
        return matching


def parse_tokens(content: bytes) -> list[tuple[bytes, Caller]]:
    """Parse a file of tokens into pairs (SHA-256 of the token, its caller).

    Raises:
        ValueError: it is not TOML, or a field is wrong. The message holds no token.
    """
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"tokens: expected TOML, got a file with a fault: {error}") from error
    if not 1 <= len(tables) <= MAX_TOKENS:
        raise ValueError(f"tokens: expected 1 to {MAX_TOKENS} tokens, got {len(tables)}")
    entries = [_parse_entry(name, table) for name, table in tables.items()]
    if len({digest for digest, _ in entries}) < len(entries):
        raise ValueError("tokens: expected different tokens, got one of them twice")
    return entries


def holds_plain_tokens(content: bytes) -> bool:
    """Return whether a file of tokens holds one itself, not digests alone; False if it is no such
    file.
    """
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False
    return any(isinstance(table, Mapping) and "token" in table for table in tables.values())


def _parse_entry(name: str, table: object) -> tuple[bytes, Caller]:
    if not NAME.fullmatch(name):
        raise ValueError(f"tokens: expected names of letters, digits, _ . and -, got {name!r}")
    if not isinstance(table, Mapping):
        raise ValueError(f"tokens: expected a table [{name}], got a value")
    for key in table:
        if key not in FIELDS:
            raise ValueError(f"tokens: {name}: expected {', '.join(FIELDS)}, got {key!r}")
    rights = table.get("rights")
    named = isinstance(rights, list) and all(right in RIGHTS for right in rights)
    if not rights or not named:
        raise ValueError(f"tokens: {name}: rights: expected some of {', '.join(RIGHTS)}")
    rate = _parse_number(name, "rate", table.get("rate", math.inf))
    burst = _parse_number(name, "burst", table.get("burst", max(BURST_S * rate, 1.0)), least=1.0)
    caller = Caller(name, frozenset(rights), TokenBucket(rate, burst))
    return _parse_digest(name, table), caller


def _parse_digest(name: str, table: Mapping[str, Any]) -> bytes:
    if ("token" in table) == ("sha256" in table):
        raise ValueError(f"tokens: {name}: expected either token or sha256")
    if "token" in table:
        token = table["token"]
        if not isinstance(token, str) or not SHORTEST <= len(token.encode()) <= LONGEST:
            raise ValueError(f"tokens: {name}: token: expected {SHORTEST} to {LONGEST} bytes")
        return sha256(token.encode()).digest()
    try:
        digest = bytes.fromhex(table["sha256"])
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise ValueError(f"tokens: {name}: sha256: expected 64 hexadecimal digits")
    return digest


def _parse_number(name: str, key: str, value: object, least: float = 0.0) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if not number > 0 or number < least:
        raise ValueError(f"tokens: {name}: {key}: expected a number above {least:g}, got {value!r}")
    return number
