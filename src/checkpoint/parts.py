"""Part files: what one process says of the files that it wrote, until the step is committed."""

from typing import Any

from cairn.checkpoint.checksums import FileChecksum


def part_content(attempt: str, files: dict[str, FileChecksum]) -> dict[str, Any]:
    """What a part file says: who wrote it, and what it contributes to which file's checksums."""
    entries = {
        name: {
            "size": file.size,
            "nbytes": file.nbytes,
            "crcs": [[k, f"{v:016x}"] for k, v in file.crcs.items()],
        }
        for name, file in files.items()
    }
    return {"attempt": attempt, "files": entries}


def read_part(content: dict[str, Any]) -> dict[str, FileChecksum]:
    """The checksums in a part file."""
    return {
        name: FileChecksum(entry["size"], {k: int(v, 16) for k, v in entry["crcs"]}, entry["nbytes"])
        for name, entry in content["files"].items()
    }
