"""S3's own calls: one request where fsspec makes two, listings page by page, and limits on waiting.

Works on a file system of ``s3fs`` (``pip install kvstore-llm[s3]``), which fsspec imports for a root in a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.root.interface import Entry, Seen, Stat
from kvstore.root.remote import GONE, Remote, stat_of

PRECONDITION_FAILED = 412
RANGE_NOT_SATISFIABLE = 416
CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 10
REQUEST_ATTEMPTS_MAX = 3
"""Attempts of botocore for one request: connection errors, 5xx, throttling."""
CALL_ATTEMPTS_MAX = 2
"""Attempts of s3fs for a call, also after a broken answer. Its default times botocore's is 25: minutes of waiting."""
CONNECTIONS_MAX = 64
SINGLE_PUT_BYTES = 1 << 31
"""s3fs writes up to twice this size with one PUT; a multipart upload is not conditional on every server."""


class S3Remote(Remote):
    """A bucket, or a prefix in one."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs, conditional=True)
        self._closed = False
        fs.retries = CALL_ATTEMPTS_MAX

    def stat(self, path: str) -> Stat | None:
        bucket, key = self._split(path)
        try:
            # fsspec's info lists the bucket after a miss, to see whether the name is a folder.
            found = self.fs.call_s3("head_object", Bucket=bucket, Key=key)
        except GONE:
            return None
        return stat_of({"size": found["ContentLength"], "LastModified": found.get("LastModified")})

    def look(self, path: str, size_bytes: int) -> Seen | None:
        """Makes one GET, so that tag, stat and first bytes are of one version."""
        from fsspec.asyn import sync

        bucket, key = self._split(path)
        # An empty file has no range to give; a GET without a range answers.
        for part in ({"Range": f"bytes=0-{max(size_bytes, 1) - 1}"}, {}):
            try:
                found, content = sync(self.fs.loop, self._get, bucket, key, part)
            except GONE:
                return None
            except OSError as cause:
                if _status(cause) != RANGE_NOT_SATISFIABLE:
                    raise
                continue
            # "bytes 0-127/8192"; without it the answer is the whole file.
            size = found.get("ContentRange", "").rpartition("/")[2] or found["ContentLength"]
            stat = stat_of({"size": size, "LastModified": found.get("LastModified")})
            return Seen(stat, content[:size_bytes], found.get("ETag"))
        return None

    def create(self, path: str, content: bytes) -> None:
        try:
            super().create(path, content)
        except OSError as cause:
            # s3fs reports it only if the server names the condition; Ceph does not.
            if _status(cause) == PRECONDITION_FAILED:
                raise FileExistsError(f"{path}: refused, the name is taken") from cause
            raise

    def delete_if(self, path: str, tag: str) -> bool:
        bucket, key = self._split(path)
        try:
            # A botocore that does not know IfMatch never sees it: s3fs drops parameters that the library has no name
            # for.
            self.fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=tag)
        except GONE:
            return True
        except OSError as cause:
            if _status(cause) != PRECONDITION_FAILED:
                raise
            # By RFC 9110 a missing file fails the condition too; S3 answers 404 or 204 there.
            return self.stat(path) is None
        return True

    def pages(self, folder: str) -> Iterator[list[Entry]]:
        bucket, key = self._split(folder)
        prefix = f"{key}/" if key else ""
        more: dict[str, Any] = {}
        while True:
            # fsspec's ls collects a folder of any size before it returns.
            page = self.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
            found = [Entry(item["Prefix"][len(prefix) : -1], None) for item in page.get("CommonPrefixes", ())]
            found += [
                Entry(item["Key"][len(prefix) :], stat_of({"size": item["Size"], "LastModified": item["LastModified"]}))
                for item in page.get("Contents", ())
                if item["Key"] != prefix
            ]
            if found:
                yield found
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove_folder(self, folder: str) -> bool:
        return not any(self.pages(folder))

    def copy(self, source: str, path: str) -> None:
        self.fs.cp_file(source, path)

    def close(self) -> None:
        if self.fs._s3 is not None and not self._closed:
            self._closed = True
            self.fs.close_session(self.fs.loop, self.fs._s3)

    async def _get(self, bucket: str, key: str, part: Mapping[str, str]) -> tuple[Mapping[str, Any], bytes]:
        """Returns the answer to a GET, and its body."""
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, **part)
        try:
            return answer, await answer["Body"].read()
        finally:
            answer["Body"].close()

    def _write(self, path: str, content: bytes, mode: str | None) -> None:
        options = {} if mode is None else {"mode": mode}
        self.fs.pipe_file(path, content, chunksize=SINGLE_PUT_BYTES, **options)

    def _split(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.strip("/").partition("/")
        return bucket, key


def _status(cause: OSError) -> int | None:
    """Returns the HTTP status behind an error of s3fs; None if there was no answer."""
    answer = getattr(cause.__cause__, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options for s3fs: the caller's, with limits on waiting where the caller sets none."""
    # Imported here, because only a root in a bucket needs it.
    from s3fs.core import AioConfig

    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS_MAX},
        "max_pool_connections": CONNECTIONS_MAX,
    }
    # Chunks carry checksums of their own. botocore's cost a second pass over the bytes, and some servers answer a range
    # with the checksum of the whole object, which fails every such read. Older botocore has neither option.
    for option in ("request_checksum_calculation", "response_checksum_validation"):
        if option in AioConfig.OPTION_DEFAULTS:
            config[option] = "when_required"
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
