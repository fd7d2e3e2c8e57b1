"""Numbers in a sentence: as words, or as digits without an exponent."""

from decimal import Decimal

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
SIZES = [(10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = [
    "zeroth",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]


def number_to_words(number: float) -> str:
    """Return a number below 10^12 in words, to six digits: 2914.5 -> "two thousand nine hundred
    fourteen point five".
    """
    if number < 0:
        return f"minus {number_to_words(-number)}"
    integer, _, fraction = format_number(number).partition(".")
    words = _integer_to_words(int(integer))
    if not fraction:
        return words
    return " ".join([words, "point", *(ONES[int(digit)] for digit in fraction)])


def _integer_to_words(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return f"{TENS[tens - 2]}-{ONES[ones]}" if ones else TENS[tens - 2]
    size, name = next(entry for entry in SIZES if entry[0] <= number)
    count, rest = divmod(number, size)
    words = f"{_integer_to_words(count)} {name}"
    return f"{words} {_integer_to_words(rest)}" if rest else words


def format_number(number: float) -> str:
    """Return a number rounded to six significant digits, without an exponent: 1234567 -> "1234570"."""
    return format(Decimal(f"{number:g}"), "f")
