"""A real S3 server on this machine, for the tests that read and write buckets."""

import zlib
from collections.abc import Iterator

import fsspec
import pytest
import s3fs
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="module")
def s3_server() -> Iterator[None]:
    """An S3 server on this machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "none")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        yield
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.fixture(name="s3")
def s3_folder(s3_server: None, request: pytest.FixtureRequest) -> str:
    """The address of an empty folder of a bucket."""
    fs = fsspec.filesystem("s3")
    if not fs.exists("bucket"):
        fs.mkdir("bucket")
    return f"s3://bucket/{zlib.crc32(request.node.name.encode())}"
