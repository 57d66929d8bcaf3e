"""Addresses of buckets: which are taken for one, and what an error says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.store.run_store import stored_runs
from spotlight_bucket.bucket_objects import BucketError, _in_words
from spotlight_bucket.local_copies import folder_of
from spotlight_rewards.base.file_errors import StoreError


def test_an_error_names_no_secret_of_an_address() -> None:
    error = OSError("error sending request for url (http://key:secret@127.0.0.1:1/b/x?sig=signature)")
    said = _in_words(error)
    assert "127.0.0.1:1/b/x" in said
    assert "secret" not in said
    assert "signature" not in said


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/../x", "s3://bucket//x", "s3://", "s3://bucket/a\nb", "s3://buc ket/x", "S3://b/x"],
)
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(BucketError, match="is not the address of a bucket"):
        folder_of(address, tmp_path)


def test_places_are_folders_or_addresses_of_a_kind_that_is_known() -> None:
    assert stored_runs(Path("runs")) is None
    assert stored_runs(Path("/mnt/s3/runs")) is None
    found = stored_runs(Path("s3://bucket/prefix"))
    assert found is not None
    assert found.address == "s3://bucket/prefix"
    with pytest.raises(StoreError, match="ftp://host/x; expected a folder, or an address of a kind"):
        stored_runs(Path("ftp://host/x"))
