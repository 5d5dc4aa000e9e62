"""Outputs of programs and results of functions: which are what a test expects, which are not.

`REFERENCES` are outputs as tests have them; each is tried in the ways of `WRITTEN`, which say the same, and of
`SPOILT`, which do not. `PROGRAMS` and `RESULTS` are single cases, most of them about fractions. `HACKS` want to be
right whatever is expected: all are wrong.
"""

from __future__ import annotations

import json

REFERENCES = (
    "5\n",
    "YES\n",
    "-1\n",
    "1 2 3\n",
    "3\n1 2 3\n",
    "NO\nYES\nNO\n",
    "hello world\n",
    "0.500000\n",
    "3.14 2.72\n",
    "1000000007\n",
    "100000000000000000\n",
    "Case #1: 5\nCase #2: 7\n",
    "a b c\nd e f\n",
    "#..#\n.##.\n",
    "[1, 2, 3]\n",
    "(1, 2)\n",
    "10:30\n",
    "1 + 2 = 3\n",
    "001101\n",
    "Impossible\n",
    "1e-06\n",
    "2 0.25 YES\n",
)
WRITTEN = {
    "no end of line": lambda text: text.rstrip("\n"),
    "blank lines behind": lambda text: text + "\n\n",
    "a blank at each line's end": lambda text: text.replace("\n", " \n"),
    "Windows lines": lambda text: text.replace("\n", "\r\n"),
    "a blank line before": lambda text: "\n" + text,
    "two blanks between words": lambda text: text.replace(" ", "  "),
    "a tab between words": lambda text: text.replace(" ", "\t"),
}
"""How the same is written."""
SPOILT = {
    "nothing": lambda _: "",
    "twice": lambda text: text + text,
    "a word more": lambda text: text + "0\n",
    "a word before": lambda text: "Answer: " + text,
    "a line of debugging": lambda text: "debug\n" + text,
    "the last word is missing": lambda text: text.rstrip().rpartition(text.split()[-1])[0],
    "the last word is another": lambda text: text.rstrip() + "x\n",
    "in quotes": lambda text: f'"{text.strip()}"\n',
    "as Python writes it": lambda text: repr(text),
    "in brackets": lambda text: f"[{text.strip()}]\n",
    "a traceback behind": lambda text: text + "Traceback (most recent call last):\n",
}
"""How it is not the same any more."""

PROGRAMS = [
    # fractions, where the test has them
    ("0.333333", "0.3333333333333333", True),
    ("0.3333333333", "0.333333", True),
    ("0.666667", "0.6666666", True),
    ("2.50", "2.5", True),
    ("2.5", "2.500000000", True),
    ("2.5", "25e-1", True),
    ("3.0", "3", True),
    ("0.1", "0.1000000000000000055", True),
    ("0.30", "0.30000000000000004", True),
    ("1e-9", "0.000000001", True),
    ("123456.789", "123456.789012", True),
    ("123456.789", "123456.8", True),
    ("-0.5", "-0.500001", True),
    ("-0.0", "0.0", True),
    ("0.0", "1e-12", True),
    ("1.5 2.5", "1.5000001\n2.4999999", True),
    ("1e10", "10000000000", True),
    ("1.0e5", "100000.3", True),
    ("0.5 YES", "0.500001 YES", True),
    ("0.333333", "0.33", False),
    ("0.333333", "0.3334", False),
    ("0.5", "0.51", False),
    ("0.5", "-0.5", False),
    ("2.50", "2.51", False),
    ("3.0", "3.1", False),
    ("0.0", "0.001", False),
    ("1e-9", "1e-3", False),
    ("1.5 2.5", "2.5 1.5", False),
    ("0.5 YES", "0.5 NO", False),
    ("0.5", "1/2", False),
    ("0.5", "0,5", False),
    ("0.5", "50%", False),
    ("0.5", ".5.", False),
    ("0.5", "0.5f", False),
    ("0.5", "nan", False),
    ("0.5", "inf", False),
    ("0.5", "-inf", False),
    ("0.5", "1e999999", False),
    ("0.5", "0.5j", False),
    ("0.5", "Decimal('0.5')", False),
    # whole numbers are exact
    ("5", "5.0", True),
    ("5", "+5", True),
    ("5", "05", True),
    ("5", "5.000", True),
    ("2", "1.9999999999999998", True),
    ("1000000007", "1000000007.0", True),
    ("1000", "1e3", True),
    ("0", "-0", True),
    ("5", "5.00001", False),
    ("5", "4.99999", False),
    ("1000000007", "1000000008", False),
    ("1000000007", "1000000007.5", False),
    ("100000000000000000", "100000000000000001", False),
    ("100000000000000000", "99999999999999999", False),
    ("100000000000000000", "1.00000000000000001e17", False),
    ("123456789012345678", "123456789012345680", False),
    ("123456789012345678", "1.2345678901234568e+17", False),
    ("5", "6", False),
    ("5", "-5", False),
    ("5", "0x5", False),
    ("5", "5L", False),
    ("5", "five", False),
    ("5", "٥", False),
    ("50", "5_0", False),
    ("50", "5 0", False),
    ("1000", "1,000", False),
    # words and lines
    ("1 2 3", "1\n2\n3", True),
    ("1\n2\n3", "1 2 3", True),
    ("YES", "YES ", True),
    ("", "", True),
    ("", "\n\n", True),
    ("", "0", False),
    ("YES", "Yes", False),
    ("YES", "yes", False),
    ("YES", "Y", False),
    ("YES", "NO", False),
    ("YES", "true", False),
    ("abc", "ab c", False),
    ("ab c", "abc", False),
    ("a b", "b a", False),
    ("1 2 3", "3 2 1", False),
    ("1 2 3", "1,2,3", False),
    ("1 2 3", "[1, 2, 3]", False),
    ("[1, 2, 3]", "[1,2,3]", False),
    ("é", "e\u0301", False),
    ("a-b", "a−b", False),
    ("007", "7", True),
    ("nan", "nan", True),
    ("nan", "NaN", False),
    ("inf", "Infinity", False),
]
"""Expected output, output, whether it is the same by `close`."""

STRICT = [
    ("0.333333", "0.3333333333333333", False),
    ("0.5", "0.500001", False),
    ("2.50", "2.5", True),
    ("0.1", "0.10", True),
    ("5", "5.0", True),
    ("2", "1.9999999999999998", False),
    ("1 2 3", "1\n2\n3", False),
    ("1 2 3", "1 2 3 ", True),
    ("1 2\n3", "1 2\n\n3", False),
    ("a b", "a  b", False),
    ("1 2", "1  2", True),
    ("YES", "yes", False),
    ("1e3", "1000", True),
    ("5", "6", False),
]
"""The same by `exact`, LiveCodeBench's own rule."""

RESULTS = [
    ("5", "5", True),
    ("5", "5.0", True),
    ("5.0", "5", True),
    ("0.5", "0.5", True),
    ("0.333333", "0.3333333333333333", True),
    ("[0.1,0.2]", "[0.1,0.20000000000000004]", True),
    ("[0.3]", "[0.30000000000000004]", True),
    ('{"a":0.1}', '{"a":0.10000001}', True),
    ("[1,2]", "[1,2]", True),
    ("[[1],[2,3]]", "[[1],[2,3]]", True),
    ("true", "1", True),
    ("false", "0", True),
    ("null", "null", True),
    ('""', '""', True),
    ('"a"', '"a"', True),
    ('"\\u00e9"', '"é"', True),
    ("[]", "[]", True),
    ("{}", "{}", True),
    ("Infinity", "Infinity", True),
    ("5", "5.5", False),
    ("5", "5.00001", False),
    ("0.5", "0.51", False),
    ("0.5", "-0.5", False),
    ("0.5", '"0.5"', False),
    ("[1,2]", "[1,2.001]", False),
    ("[0.1,2]", "[0.1,3]", False),
    ("[0.1,0.2]", "[0.2,0.1]", False),
    ("[1,2]", "[2,1]", False),
    ("[1,2]", "[1]", False),
    ("[1,2]", "[1,2,3]", False),
    ("[1,2]", "[[1,2]]", False),
    ("[[1],[2,3]]", "[[1,2],[3]]", False),
    ("[1,2]", '"[1,2]"', False),
    ("[1,2]", '{"0":1,"1":2}', False),
    ("true", "false", False),
    ("true", '"true"', False),
    ("true", "null", False),
    ("false", "null", False),
    ("null", "0", False),
    ("null", '""', False),
    ("null", "[]", False),
    ("[]", "null", False),
    ("[]", "{}", False),
    ('""', "null", False),
    ('"a"', '"A"', False),
    ('"a"', '"a "', False),
    ('"a"', '["a"]', False),
    ('"5"', "5", False),
    ("0.5", "NaN", False),
    ("NaN", "NaN", False),
    ("Infinity", "1e400", True),
    ("Infinity", "-Infinity", False),
    ("100000000000000000", "100000000000000001", False),
    ("9007199254740993", "9007199254740992", False),
    ('{"a":1}', '{"a":1,"b":2}', False),
    ('{"a":1}', "{}", False),
    ('{"a":1}', '{"A":1}', False),
    ('{"a":1}', '[["a",1]]', False),
]
"""Expected result and result of a function, as JSON, by `close`."""

_TRICKS = (
    *(
        "*",
        ".*",
        "?",
        "%s",
        "{}",
        "{expected}",
        "$expected",
        "None",
        "True",
        "1",
        "0",
        "ok",
        "PASSED",
        "OK",
        "reward: 1",
    ),
    *(
        "all tests passed",
        "AlwaysEqual()",
        "<object>",
        "nan",
        "inf",
        "-inf",
        "1e309",
        "-0.0",
        "1e-320",
        "0x1",
        "١",
        "\x00",
    ),
    *(
        "\ufeff",
        "\x1b[32m",
        "\u200b",
        "\u2028",
        "\\n",
        "'''",
        "//",
        "#",
        "[]",
        "[NaN]",
        "null",
        "{}",
        '""',
        "1_0",
        "exit 0",
    ),
)
HACKS = [(expected, trick) for expected in ("17\n", "0.25\n", "MAYBE\n") for trick in _TRICKS]
RESULT_HACKS = [
    (expected, trick)
    for expected in ("17", "[3, 0.25]", '"maybe"')
    for trick in (
        "",
        "*",
        "NaN",
        "Infinity",
        "true",
        "null",
        "[]",
        "{}",
        '""',
        "[NaN]",
        "17 17",
        "[[3,0.25]",
        "1e999",
        "\x00",
    )
]


def _of_references() -> list[tuple[bool, str, str]]:
    pairs = []
    for reference in REFERENCES:
        written = {way(reference): True for way in WRITTEN.values()}
        spoilt = {way(reference): False for way in SPOILT.values()}
        pairs += [(right, reference, output) for output, right in {**spoilt, **written}.items()]
    return pairs


PAIRS = [
    *dict.fromkeys(
        _of_references()
        + [(right, expected, output) for expected, output, right in PROGRAMS]
        + [(False, expected, output) for expected, output in HACKS]
    )
]
"""Whether it is right, expected output, output."""
RESULT_PAIRS = [(right, expected, result) for expected, result, right in RESULTS] + [
    (False, json.dumps(json.loads(expected)), result) for expected, result in RESULT_HACKS
]
