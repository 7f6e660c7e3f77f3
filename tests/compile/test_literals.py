"""Whole numbers in CUDA C++: NVRTC reads each of them with the value and the type that the expression has.

A minus is no part of a literal. 9223372036854775808ll fits no signed type, and NVRTC takes it, without a warning, for
an unsigned number, so that what is compared with its negative is unsigned, too.
"""

from __future__ import annotations

from attngen.lang.emit import emit
from attngen.lang.ir import Const, Type
from attngen.lang.languages import Target
from attngen.render import Source
from tests.compile.frontend import to_ptx

NUMBERS = sorted(
    number
    for power in (0, 7, 8, 15, 16, 30, 31, 32, 62, 63)
    for sign in (-1, 1)
    for near in (-1, 0, 1)
    if -(2**63) <= (number := sign * 2**power + near) < 2**63
)

_SAME = """template <typename A, typename B> constexpr bool same = false;
template <typename A> constexpr bool same<A, A> = true;
"""


def test_every_whole_number_has_its_value_and_its_type() -> None:
    lines = []
    for number in NUMBERS:
        text = emit(Const(number, Type.INT), Target.CUDA, {}).result
        kind = "int" if -(2**31) <= number < 2**31 else "long long"
        lines += [
            f"static_assert(same<decltype({text}), {kind}>);",
            f"static_assert(({text}) == static_cast<long long>({number % 2**64:#x}ull));",
            f"static_assert(({text}) < 0 == {'true' if number < 0 else 'false'});",
        ]
    to_ptx(Source("literals", _SAME + "\n".join(lines), "cuda"))
