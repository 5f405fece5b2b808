"""Copies within S3, which count if S3 tells that they have the checksum of what they are to be.

What is copied may be damaged, or have been replaced since its manifest was read. A copy that S3 does not
vouch for is sent instead.
"""

from collections.abc import Mapping

from cairn.checkpoint.checksums import join_crcs
from cairn.checkpoint.manifest import FileEntry
from cairn.remote.client.s3 import S3, crc_text
from cairn.remote.client.upload_body import Chunk, ObjectRange, chunks_of
from cairn.run.object_store import Refused, tag

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
