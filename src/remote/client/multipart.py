"""Uploads to S3 in parts, which go on where a killed process has left them.

A part is one chunk of the manifest, or several where a file has more chunks than S3 allows parts. It goes
with the CRC-64/NVME that the manifest has for it, so S3 refuses what differs from it, and the whole object is
completed with the CRC-64/NVME that follows from those.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from xml.sax.saxutils import escape

from cairn.checkpoint.checksums import join_crcs
from cairn.checkpoint.manifest import FileEntry
from cairn.remote.client.s3 import CRC_HEADER, S3, LocalError, crc_number, crc_text
from cairn.remote.client.upload_body import (
    Chunk,
    ObjectRange,
    SentParts,
    UnfinishedUpload,
    UploadBody,
    chunks_of,
)
from cairn.run.faults import fault_point
from cairn.run.object_store import Refused, RemoteError, tag

# Copies within S3, which count if S3 tells that they have the checksum of what they are to be.


ALGORITHM = {"x-amz-checksum-algorithm": "CRC64NVME"}
"""Header of requests that begin what is to have such a checksum."""


class ServerCopies:
    """Copies objects, and ranges of them, below a URL.

    A place from which S3 refuses to copy, or tells no checksum of copies, is not asked again.
    """

    def __init__(self, s3: S3):
        self._s3 = s3
        self._useless: set[str] = set()
        """URLs from which nothing can be copied."""

    def file(self, source: str, name: str, entry: FileEntry) -> str | None:
        """Copy an object to `name`, and return the copy's ETag; None: it is to be sent.

        Raises:
            RemoteError: the object store fails.
        """
        place = ObjectRange(self._s3.url, source, 0)
        return tag(self._copy(name, {}, ALGORITHM, place, join_crcs(chunks_of(entry))))

    def part(self, name: str, upload: str, number: int, place: ObjectRange, part: Chunk) -> str | None:
        """Copy a part of an upload from a place, and return its ETag; None: it is to be sent.

        Args:
            part: its checksum and size.

        Raises:
            Refused: the upload is gone.
            RemoteError: the object store fails.
        """
        crc, size = part
        asked = {"x-amz-copy-source-range": f"bytes={place.first}-{place.first + size - 1}"}
        return self._copy(name, {"partNumber": number, "uploadId": upload}, asked, place, crc)

    def _copy(
        self, name: str, query: dict[str, str | int], headers: Mapping[str, str], place: ObjectRange, crc: int
    ) -> str | None:
        if place.url in self._useless:
            return None
        headers = {**headers, "x-amz-copy-source": self._s3.source(place.url, place.name)}
        try:
            copied = self._s3.request("PUT", name, query, headers=headers).xml()
        except Refused as error:
            if error.code == "NoSuchUpload":
                raise
            if error.code != "NoSuchKey":
                self._useless.add(place.url)
            return None
        if not (told := copied.text("ChecksumCRC64NVME")):
            self._useless.add(place.url)
        return copied.text("ETag") if told == crc_text(crc) else None


MOST_PARTS = 10_000
"""Of an object of S3."""
TRIES = 3
"""How often a part is sent that S3 finds damaged."""
GONE = {"NoSuchUpload", "InvalidPart", "BadDigest"}
"""S3's names for reasons why an upload can't be completed: another one has to begin."""


@dataclass(frozen=True)
class Unfinished:
    """An upload that was not completed.

    name: of the object, relative to the URL. begun: by the clock of the object store.
    """

    name: str
    upload: str
    begun: datetime


@dataclass(frozen=True)
class _Part:
    """A part: its number, counted from 1, its chunks, size in bytes, and CRC-64/NVME."""

    number: int
    chunks: range
    size: int
    crc: int


class Multipart:
    """Uploads in parts below a URL.

    Args:
        copies: copies what the object store has already.
        has: the ETag of the object of this name if it has this content, else None.
        concurrent: parts of an object that are sent at once.
    """

    def __init__(
        self, s3: S3, copies: ServerCopies, has: Callable[[str, UploadBody], str | None], concurrent: int
    ):
        self._s3 = s3
        self._copies = copies
        self._has = has
        self._concurrent = concurrent
        self._left: dict[str, list[str]] = {}

    def unfinished(self, prefix: str) -> list[Unfinished]:
        """The uploads of objects whose names begin with `prefix`; later ones of these objects continue them.

        A store that can't list them has none.

        Raises:
            RemoteError: the object store fails.
        """
        query: dict[str, str | int] = {"uploads": "", "prefix": self._s3.key(prefix)}
        found: list[Unfinished] = []
        begin = len(self._s3.key(""))
        while True:
            try:
                page = self._s3.request("GET", None, query).xml()
            except Refused:  # not permitted, or not known there
                break
            for row in page.all("Upload"):
                begun = datetime.fromisoformat(row.text("Initiated") or "9999-01-01")
                begun = begun if begun.tzinfo else begun.replace(tzinfo=UTC)
                found.append(Unfinished(row.text("Key")[begin:], row.text("UploadId"), begun))
            if page.text("IsTruncated") != "true":
                break
            query |= {
                "key-marker": page.text("NextKeyMarker"),
                "upload-id-marker": page.text("NextUploadIdMarker"),
            }
        self._left = {}
        for row in sorted(found, key=lambda row: row.begun, reverse=True):
            self._left.setdefault(row.name, []).append(row.upload)
        return found

    def abort(self, name: str, upload: str) -> None:
        """End an upload: the store forgets its parts.

        Raises:
            RemoteError: the object store refuses or fails.
        """
        try:
            self._s3.request("DELETE", name, {"uploadId": upload})
        except Refused as error:
            if error.code != "NoSuchUpload":
                raise
        if upload in self._left.get(name, []):
            self._left[name].remove(upload)

    def put(self, name: str, content: UploadBody, notes: SentParts) -> str | None:
        """Upload an object, and return its ETag; parts that have arrived before are not sent again.

        Raises:
            RemoteError: the object store refuses or fails; the parts that have arrived stay there.
            Damaged: the file is not what the manifest says.
            OSError: it can't be read.
        """
        parts = _parts(content)
        for last in (False, True):
            noted = self._begun(name, parts, notes)
            upload = str(noted.upload)
            try:
                missing = [part for part in parts if not _arrived(part, noted)]
                self._send(name, content, notes, missing, copies=not last)
                content.guard()
                etag = self._complete(name, parts, noted)
            except LocalError as error:
                notes.begin(None)
                self._try_to_abort(name, upload)
                raise error.cause from None
            except Refused as error:
                if error.code not in GONE:
                    raise
                notes.begin(None)
                self._try_to_abort(name, upload)
                # Perhaps it was completed, and the answer was lost.
                etag = self._has(name, content) if error.code == "NoSuchUpload" else None
                if etag is None:
                    if last:
                        raise
                    continue
            for other in self._left.pop(name, []):
                if other != upload:
                    self._try_to_abort(name, other)
            return etag
        raise AssertionError

    def _begun(self, name: str, parts: list[_Part], notes: SentParts) -> UnfinishedUpload:
        """An upload to go on with: the noted one, one that the object store has, or a new one."""
        noted = notes.noted()
        if noted.upload is not None and noted.part_bytes == parts[0].size:
            return noted
        upload, found = self._found(name, parts) or (self._create(name), {})
        notes.begin(upload, parts[0].size)
        for number, (etag, crc) in found.items():
            notes.add(number, etag, crc)
        return notes.noted()

    def _create(self, name: str) -> str:
        headers = ALGORITHM | {"x-amz-checksum-type": "FULL_OBJECT"}
        answer = self._s3.request("POST", name, {"uploads": ""}, headers=headers).xml()
        if upload := answer.text("UploadId"):
            return upload
        raise Refused(
            f"{self._s3.url}/{name}: the object store names no upload that it has begun", "NoUpload"
        )

    def _found(self, name: str, parts: list[_Part]) -> tuple[str, dict[int, tuple[str, int]]] | None:
        """The upload of this object that has most of its parts, and those parts, by S3's own account.

        Only parts whose checksum S3 tells count.
        """
        best: tuple[str, dict[int, tuple[str, int]]] | None = None
        for upload in self._left.get(name, []):
            noted = UnfinishedUpload(upload, parts[0].size, self._listed(name, upload))
            fitting = {part.number: noted.parts[part.number] for part in parts if _arrived(part, noted)}
            if fitting and (best is None or len(fitting) > len(best[1])):
                best = upload, fitting
        return best

    def _listed(self, name: str, upload: str) -> dict[int, tuple[str, int]]:
        """ETag and CRC-64/NVME of the parts of an upload."""
        query: dict[str, str | int] = {"uploadId": upload}
        found: dict[int, tuple[str, int]] = {}
        while True:
            try:
                page = self._s3.request("GET", name, query).xml()
            except Refused:
                return {}
            for row in page.all("Part"):
                if crc := row.text("ChecksumCRC64NVME"):
                    found[int(row.text("PartNumber"))] = row.text("ETag"), crc_number(crc)
            if page.text("IsTruncated") != "true":
                return found
            query["part-number-marker"] = page.text("NextPartNumberMarker")

    def _send(
        self, name: str, content: UploadBody, notes: SentParts, missing: list[_Part], *, copies: bool
    ) -> None:
        """Send parts, several at a time, or copy what the object store has already, and note each."""
        content.on_bytes(content.size - sum(part.size for part in missing))
        upload = str(notes.noted().upload)

        def send(part: _Part) -> None:
            etag = self._copy_part(name, upload, part, content) if copies else None
            etag = etag or self._put_part(name, upload, part, content)
            notes.add(part.number, etag, part.crc)
            content.on_bytes(part.size)
            fault_point("remote.sent_part")

        with ThreadPoolExecutor(self._concurrent) as pool:
            list(pool.map(send, missing))

    def _copy_part(self, name: str, upload: str, part: _Part, content: UploadBody) -> str | None:
        """Copy a part from where the object store has its content, and return its ETag; None: send it."""
        place = content.known(content.chunks(part.chunks))
        if place is None:
            return None
        return self._copies.part(name, upload, part.number, place, (part.crc, part.size))

    def _put_part(self, name: str, upload: str, part: _Part, content: UploadBody) -> str:
        """Send a part, and return its ETag."""
        for tries_left in reversed(range(TRIES)):
            try:
                answer = self._s3.request(
                    "PUT",
                    name,
                    {"partNumber": part.number, "uploadId": upload},
                    headers={CRC_HEADER: crc_text(part.crc)},
                    body=lambda: content.blocks(part.chunks),
                    size=part.size,
                )
            except Refused as error:
                if error.code != "BadDigest" or not tries_left:
                    raise
            else:
                if etag := answer.headers.get("etag"):
                    return etag
                raise Refused(f"{self._s3.url}/{name}: the object store names no ETag of a part", "NoETag")
        raise AssertionError

    def _complete(self, name: str, parts: list[_Part], noted: UnfinishedUpload) -> str | None:
        """Make the parts an object, and return its ETag."""
        rows = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(noted.parts[part.number][0])}</ETag>"
            f"<ChecksumCRC64NVME>{crc_text(part.crc)}</ChecksumCRC64NVME></Part>"
            for part in parts
        )
        body = (
            '<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{rows}</CompleteMultipartUpload>"
        )
        crc = join_crcs((part.crc, part.size) for part in parts)
        headers = {CRC_HEADER: crc_text(crc), "x-amz-checksum-type": "FULL_OBJECT"}
        query = {"uploadId": str(noted.upload)}
        answer = self._s3.request("POST", name, query, headers=headers, body=body.encode())
        return tag(answer.xml().text("ETag"))

    def _try_to_abort(self, name: str, upload: str) -> None:
        """End an upload that is of no use, if the object store is in the mood for it."""
        with contextlib.suppress(RemoteError):
            self.abort(name, upload)


def _parts(content: UploadBody) -> list[_Part]:
    """The parts of a file that is not empty."""
    count = len(content.entry.crc64nvme)
    each = -(-count // MOST_PARTS)
    parts: list[_Part] = []
    for number, first in enumerate(range(0, count, each), 1):
        numbers = range(first, min(first + each, count))
        chunks = content.chunks(numbers)
        parts.append(_Part(number, numbers, sum(size for _, size in chunks), join_crcs(chunks)))
    return parts


def _arrived(part: _Part, noted: UnfinishedUpload) -> bool:
    """Whether the object store has this part with this content."""
    return part.number in noted.parts and noted.parts[part.number][1] == part.crc
