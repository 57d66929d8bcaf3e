"""Objects of one run in a bucket, by name: what this package uses of obstore, and its errors.

Names and contents are those of those who may write to the bucket: contents are read up to a size that the
caller expects, and names are compared with patterns before they are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from spotlight_rewards.base.file_errors import StoreError

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_LISTED_AT_ONCE = 1000
_CONNECT, _ANSWER = timedelta(seconds=5), timedelta(seconds=120)
_SERVICES = ("AWS", "GOOGLE", "AZURE")
_RETRIES = 3
"""Of a request, within seconds; a replicator goes on trying for as long as its run lasts."""
_RETRY_S = 15.0
_SAID = re.compile(r"<Code>([^<]{1,80})</Code>\s*<Message>([^<]{1,200})</Message>")
_SECRET = re.compile(r"\?\S+|(?<=//)[^/\s]*@")


class BucketError(StoreError):
    """The bucket does not answer, or refuses; or it holds what no run of Spotlight wrote."""


@dataclass(frozen=True, slots=True)
class Version:
    """Which content of an object is meant, and when the bucket took it, by its own clock."""

    update: UpdateVersion
    modified: datetime


class Objects:
    """The objects below an address. Every method raises :class:`BucketError`; threads may share one."""

    def __init__(self, store: ObjectStore, address: str) -> None:
        self._store, self.address = store, address

    def put(self, name: str, content: bytes) -> None:
        with self._errors(f"writing {name}"):
            self._store.put(name, content, use_multipart=False)

    def create(self, name: str, content: bytes) -> bool:
        """Whether the object is made by this call; False: one of this name is there."""
        with self._errors(f"making {name}"):
            try:
                self._store.put(name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def replace(self, name: str, content: bytes, version: Version) -> bool:
        """Whether the object still was of this version, and has the content now."""
        with self._errors(f"replacing {name}"):
            try:
                self._store.put(name, content, mode=version.update, use_multipart=False)
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                return False
            return True

    def get(self, name: str, bytes_max: int) -> tuple[bytes, Version] | None:
        """Content and version; None: there is no such object. Raises also if it is larger."""
        with self._errors(f"reading {name}"):
            try:
                found = self._store.get(name)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            about, content = found.meta, bytearray()
            for part in found.stream(min_chunk_size=1 << 20):
                content += bytes(part)
                if len(content) > bytes_max:
                    raise BucketError(
                        f"{self.address}/{name}: larger than the {bytes_max} bytes expected. No Spotlight "
                        "wrote this; remove it."
                    )
            update: UpdateVersion = {}
            if (tag := about["e_tag"]) is not None:
                update["e_tag"] = tag
            if (version := about["version"]) is not None:
                update["version"] = version
            return bytes(content), Version(update, about["last_modified"])

    def names(self, folder: str) -> Iterator[str]:
        """Names of the objects within a folder, without it, in alphabetical order."""
        with self._errors(f"listing {folder}"):
            for listed in self._store.list(folder, chunk_size=_LISTED_AT_ONCE):
                yield from (each["path"].removeprefix(f"{folder}/") for each in listed)

    def folders(self) -> list[str]:
        """Names of the folders at the top."""
        with self._errors("listing"):
            found = obstore.list_with_delimiter(self._store)["common_prefixes"]
            return sorted(each.strip("/") for each in found)

    def delete(self, names: list[str]) -> None:
        """Remove those that are there."""
        with self._errors("removing what is replaced"):
            for first in range(0, len(names), _LISTED_AT_ONCE):
                some = names[first : first + _LISTED_AT_ONCE]
                try:
                    self._store.delete(some)
                except FileNotFoundError:  # some services complain, and leave the rest
                    for name in some:
                        with suppress(FileNotFoundError):
                            self._store.delete(name)

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, NotImplementedError) as error:
            raise BucketError(f"{self.address}: {doing}: {_in_words(error)}") from error


def open_objects(address: str) -> Objects:
    """Objects below an address such as ``s3://bucket/prefix``, with credentials, region and endpoint of the
    environment. Asks the bucket nothing. Raises BucketError.
    """
    retries: RetryConfig = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    client: ClientConfig = {"connect_timeout": _CONNECT, "timeout": _ANSWER, "allow_http": _plain_http()}
    try:
        store = from_url(address, client_options=client, retry_config=retries)
    except (BaseError, ValueError, OSError) as error:
        raise BucketError(
            f"runs_dir: {address} cannot be used: {_in_words(error)}; expected s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, with its credentials in the environment."
        ) from error
    return Objects(store, address)


def _plain_http() -> bool:
    """Whether the environment asks for HTTP without TLS: which options of a client hide."""
    return any(os.environ.get(f"{each}_ALLOW_HTTP", "").lower() in ("1", "true") for each in _SERVICES)


def _in_words(error: Exception) -> str:
    """What the service said, without what may be secret in addresses: queries, which sign, and passwords."""
    text = str(error)
    if match := _SAID.search(text):
        return "".join(each for each in f"{match[1]}: {match[2]}" if each.isprintable())
    text = _SECRET.sub("", " ".join(text.split("Debug source:")[0].split()))[:300]
    is_refused = "builder error" in text and "http://" in text
    return f"{text}. An address without TLS needs AWS_ALLOW_HTTP=true." if is_refused else text
