"""The path of calls that append to caches."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.device.interface import Driver
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append.arguments import FIELDS, Append, AppendSizes, check, refuse_gradients
from attngen.runtime.operations.append.kernel import PreparedAppend, prepare
from attngen.runtime.operations.append.kinds import AppendCalls, kind_of, seen_key, seen_tensors
from attngen.runtime.operations.shared.path import Helper, Kind, PreparedHelper


class AppendHelper(Helper[Append, AppendSizes, Tensor | None]):
    """Appending to caches; a call gives its rotated queries."""

    name = "append_kv"
    fields = FIELDS

    def check(self, call: Append) -> AppendSizes:
        return check(call)

    def check_contents(self, call: Append, sizes: AppendSizes) -> None:
        append_torch.check_contents(call, sizes)

    def in_torch(self, call: Append, sizes: AppendSizes) -> Tensor | None:
        return append_torch.append(call, sizes)

    def kind_of(self, call: Append) -> Kind | None:
        return kind_of(call)

    seen_key = staticmethod(seen_key)
    seen = staticmethod(seen_tensors)

    def refuse(self, call: Append) -> None:
        refuse_gradients(call)

    def of_kind(self, call: Append, prepared: PreparedHelper[Append, Tensor | None]) -> AppendCalls:
        assert isinstance(prepared, PreparedAppend)
        return AppendCalls(prepared, call)

    def prepare(self, call: Append, sizes: AppendSizes, driver: Driver) -> PreparedAppend | str:
        return prepare(call, sizes, driver)


APPEND = AppendHelper()
