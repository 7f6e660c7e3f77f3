"""The path of calls that append to caches."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.device.interface import Driver
from attngen.runtime.helpers import append_torch
from attngen.runtime.helpers.append_arguments import FIELDS, Append, Sizes, check, refuse_gradients
from attngen.runtime.helpers.append_kernel import PreparedAppend, prepare
from attngen.runtime.helpers.append_kinds import AppendCalls, kind_of, seen_key, seen_tensors
from attngen.runtime.helpers.path import Helper, Kind, Prepared


class AppendHelper(Helper[Append, Sizes]):
    """Appending to caches; a call gives its rotated queries."""

    name = "append_kv"
    fields = FIELDS

    def check(self, call: Append) -> Sizes:
        return check(call)

    def check_contents(self, call: Append, sizes: Sizes) -> None:
        append_torch.check_contents(call, sizes)

    def in_torch(self, call: Append, sizes: Sizes) -> Tensor | None:
        return append_torch.append(call, sizes)

    def kind_of(self, call: Append) -> Kind | None:
        return kind_of(call)

    seen_key = staticmethod(seen_key)
    seen = staticmethod(seen_tensors)

    def refuse(self, call: Append) -> None:
        refuse_gradients(call)

    def of_kind(self, call: Append, prepared: Prepared) -> AppendCalls:
        assert isinstance(prepared, PreparedAppend)
        return AppendCalls(prepared, call)

    def prepare(self, call: Append, sizes: Sizes, driver: Driver) -> PreparedAppend | str:
        return prepare(call, sizes, driver)


APPEND = AppendHelper()
