"""When garbage collection pauses, and what it never looks at again."""

from __future__ import annotations

import gc

import pytest

from spotlight.garbage import collection_paused, lasting


@pytest.mark.parametrize("enabled", [False, True])
def test_what_a_start_makes_is_collected_neither_then_nor_later(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collection_paused():
            assert not gc.isenabled()
            kept = [[0]]
        assert any(each is kept for each in gc.get_objects())
        with lasting():
            assert not gc.isenabled()
            made = [[0]]
        assert gc.isenabled() == enabled
        assert not any(each is kept or each is made for each in gc.get_objects())
    finally:
        (gc.enable if before else gc.disable)()
