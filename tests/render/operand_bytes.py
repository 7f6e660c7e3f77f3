"""Bytes in the text of a CUDA kernel, as numbers: constants, and offsets of copies and of products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Numbers = Mapping[str, int]


@dataclass(frozen=True)
class Loop:
    """A loop of products: its step, and the offset of each descriptor by the value of the loop's variable."""

    variable: str
    end: int
    step: int
    products: int
    offsets: tuple[str, ...]
    names: Mapping[str, str]  # of offsets, by expressions


def constants(text: str, sizes: Numbers) -> dict[str, int]:
    """Return the integer constants of a kernel; ``sizes`` are the bytes of its types."""
    numbers = {"sizeof_float": 4}
    for name, stages in re.findall(r"using (\w+Ring) = (?:Ring<\w+, \w+, (\d+)>|Pair<)", text):
        numbers[f"{name}_kStages"] = int(stages or 2)
    for name, of in re.findall(r"using (\w*Element) = (\w+);", text):
        numbers[f"sizeof_{name}"] = sizes[of]
    for line in re.findall(r"^constexpr (?:int|uint32_t) (.*?);", text, re.MULTILINE):
        for one in _split(line):
            name, expression = one.split(" = ")
            numbers[name] = evaluate(expression, numbers)
    return numbers


def evaluate(expression: str, numbers: Numbers) -> int:
    """Return the value of an integer expression of C; names that are no numbers count as 0."""
    text = re.sub(r"sizeof\((\w+)\)", r"sizeof_\1", expression).replace("::", "_")
    text = re.sub(r"(\w+)\.\w+", r"\1", text).replace("/", "//").replace("&&", " and ").replace("||", " or ")
    names = set(re.findall(r"\b[A-Za-z_]\w*", text)) - {"and", "or"}
    return int(eval(text, {}, {name: numbers.get(name, 0) for name in names}))


def asserted(text: str) -> list[str]:
    """Return the equations that a kernel asserts of its memory."""
    lines = re.findall(r"^static_assert\((.*?)\);", text, re.MULTILINE)
    return [line for line in lines if re.search(r"\bk(Q|K|V|Out|Dout|Ds|Dq)Bytes == |^kKeys \* .* == ", line)]


def copies(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield of each copy of a box: the tensor, where it goes in shared memory, and how its loop steps."""
    flat = " ".join(text.split())
    for match in re.finditer(r"\b(?:load_box|load_box_to|store_box)\(", flat):
        arguments = [one.strip() for one in _split(_inside(flat, match.end()))]
        place = next(i for i, one in enumerate(arguments) if re.fullmatch(r"(\w+_)?map", one))
        where = arguments[place + 1] if match[0].startswith("store") else arguments[place - 1]
        step = re.findall(r"column \+= ([^)]*)\)", flat[: match.start()])[-1]
        yield arguments[place].removesuffix("map").removesuffix("_"), where, step


def product_loops(text: str, numbers: Numbers) -> Iterator[Loop]:
    """Yield the loops whose bodies issue products."""
    head = re.compile(r"for \(int (\w+) = 0; \1 < (\w+); \1 \+= ([^{]*)\) \{")
    for match in head.finditer(text):
        body = _inside(text, match.end(), "{}")
        if "Product<" not in body or head.search(body):
            continue
        names = dict(one.split(" = ") for line in re.findall(r"const uint32_t (.*?);", body) for one in _split(line))
        offsets = [_inside(body, at.end()) for at in re.finditer(r"\.at\(", body)]
        variable, end, step = match.groups()
        yield Loop(
            variable, evaluate(end, numbers), evaluate(step, numbers), body.count("Product<"), tuple(offsets), names
        )


def places(text: str) -> Iterator[str]:
    """Yield the addresses of shared memory that are not those of copies: of matrices, and of what leaves registers."""
    calls = r"\b(?:store_blocks|store_transposed|shared_at<u?int4>|\w*(?:Matrix|Rows|Columns) \w+|issue_dq)\("
    for match in re.finditer(calls, text):
        for place in _split(_inside(text, match.end())):
            if re.match(r"(here \+ )?(k[A-Z]|out_rows|to\b)", place):
                yield place
    yield from re.findall(r"(?:const uint32_t \w+ =|return) ((?:here \+ )?k[A-Z]\w* \+[^;]*|warpgroup \* [^;]*);", text)


def offset(loop: Loop, expression: str, value: int, numbers: Numbers, **others: int) -> int:
    """Return an offset of a loop for a value of its variable."""
    known = {**numbers, **others, loop.variable: value}
    known |= {name: evaluate(text, known) for name, text in loop.names.items()}
    return evaluate(expression, known)


def _inside(text: str, start: int, brackets: str = "()") -> str:
    """Text up to the bracket that closes one which is open."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == brackets[0]) - (text[i] == brackets[1])
        if depth == 0:
            return text[start:i]
    raise ValueError(text[start:])


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
